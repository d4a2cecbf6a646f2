"""Tuning: predicted acceptance against a second decoding of the calibration prompts, the summary from runs of known
speed, and drafts that are always right.
"""

import io
import json
import math

import pytest
from rich.console import Console

from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate.cost import CostModel
from drafttrain.evaluate.report import EvaluationError, write_report
from drafttrain.evaluate.run import named_prompts
from drafttrain.evaluate.runner import NGRAM, Candidate, Prompt
from drafttrain.evaluate.tune import (
    _findings,
    _halves,
    _key,
    calibrated_ks,
    print_tune,
    time_widths,
    tune,
    tune_draft,
    tuning_prompts,
    widths_of,
)
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree
from drafttrain.recipe import EvaluationConfig
from drafttrain.specdec.decode import generate
from drafttrain.target import Target
from tests.tiny_drafts import LONG, SelfProposer, agreeable_draft, make_target
from tests.tiny_models import make_model, make_tokenizer, tokens

COUNT = 10
ROWS = [row.tolist() for row in tokens(7, 6)]
CALIBRATION, TEST = ([Prompt(tuple(row)) for row in rows] for rows in (ROWS[:4], ROWS[4:]))


@pytest.fixture(scope="module")
def target() -> Target:
    """Without stop ids: every text is as long as asked, and no draft falls behind a stop."""
    model = make_model("Llama", **LONG)
    model.generation_config.eos_token_id = None
    target = Target.from_model(model, None, name="tiny Llama")
    assert target.stop_ids == ()
    return target


@pytest.fixture(scope="module")
def tuned(target):
    """Lookup and the target as its own draft, at 1 and 3 requests at a time."""
    candidates = [NGRAM, Candidate("itself", "eagle3", lambda: SelfProposer(target), True, "drafts/itself")]
    said = []
    report = tune(
        target,
        candidates,
        CALIBRATION,
        TEST,
        ks=[1, 2, 3],
        concurrency=[1, 3],
        max_new_tokens=COUNT,
        certificate=False,
        say=said.append,
    )
    return report, said


def test_calibrated_ks_span_the_range():
    assert calibrated_ks([1, 2, 3, 4, 5]) == [1, 2, 5]
    assert calibrated_ks([1, 2, 3, 4, 5, 7]) == [1, 3, 7]
    assert calibrated_ks([2, 4]) == [2, 4] and calibrated_ks([3]) == [3]


def test_widths_reach_what_chains_and_trees_verify():
    tree = Candidate("tree", "eagle3", NgramProposer, tree=DynamicTree(4, 20))
    assert widths_of([NGRAM], [1, 3]) == [1, 2, 3, 4]
    assert widths_of([Candidate("x", "ngram", NgramProposer, ks=(5,))], [1]) == [1, 2, 3, 4, 5, 6]
    assert widths_of([NGRAM, tree], [1, 3]) == [1, 2, 3, 4, 6, 8, 11, 16, 21, 23]
    assert widths_of([tree], [9])[-1] >= 21


def test_forwards_of_each_width_are_timed_behind_the_same_cache(target, monkeypatch):
    seen = []
    step = Target.step

    def watch(self, tokens_, cache, *args, **options):
        seen.append((tuple(tokens_.shape), cache.lengths.tolist()))
        return step(self, tokens_, cache, *args, **options)

    monkeypatch.setattr(Target, "step", watch)
    found = time_widths(target, [ROWS[0], ROWS[1][:4]], [1, 4], repeats=3)
    assert list(found) == [1, 4] and all(0 < seconds < 1 for seconds in found.values())
    assert seen[0] == ((2, 6), [0, 0]) and all(lengths == [6, 4] for _, lengths in seen[1:])
    assert [seen[1:].count(((2, n), [6, 4])) for n in (1, 4)] == [4, 4]  # three repeats and a warm-up


def test_every_run_is_predicted_and_the_error_is_the_ratio(tuned):
    report, said = tuned
    drafted = [run for run in report["runs"] if run["draft"] != "none"]
    assert len(drafted) == 2 * 3 * 2 and all("predicted" not in r for r in report["runs"] if r["draft"] == "none")
    for run in drafted:
        found = run["predicted"]
        assert found["error"] == pytest.approx(found["speedup"] / run["speedup"] - 1)
    errors = sorted(abs(run["predicted"]["error"]) for run in drafted)
    assert report["tune"]["median_error"] == pytest.approx((errors[5] + errors[6]) / 2)
    assert report["tune"]["calibration"] == {"prompts": 4, "k": [1, 2, 3]}
    assert report["prompts"]["count"] == 3 and "K = 1, 2, 3" in said[0] and len(said) == 2


def test_a_draft_that_is_always_right_is_predicted_exactly(tuned):
    report, _ = tuned
    for run in report["runs"]:
        if run["label"].startswith("itself"):
            assert run["predicted"]["tau"] == pytest.approx(run["k"] + 1) == run["mean_acceptance_length"]


def test_acceptance_comes_from_the_calibration_prompts_alone(tuned, target):
    report, _ = tuned
    for k in (1, 2, 3):
        decoded = [generate(target, [row], NgramProposer(), k=k, max_new_tokens=COUNT).counts for row in ROWS[:4]]
        tau = 1 + sum(one.accepted for one in decoded) / sum(one.iterations for one in decoded)
        for run in report["runs"]:
            if run["label"] == f"n-gram k={k}":
                assert run["predicted"]["tau"] == pytest.approx(tau)


def test_costs_settings_and_break_even_are_there(tuned, tmp_path):
    report, _ = tuned
    found = report["tune"]
    assert set(found["best"]) == {"1", "3"} == set(found["costs"])
    for label in ("n-gram", "itself"):
        costs = found["costs"]["3"][label]
        assert costs["c"] >= 0 and len(costs["v"]) == 4 and min(costs["v"]) > 0 and costs["o"] > 0
        # The plain iteration is the unit: its forward is nearly all of it.
        assert 0.5 < costs["v"][0] <= 1
        assert found["settings"][label]["best_k"].keys() == {"1", "3"}
    assert [row["label"] for row in found["break_even"]] == ["n-gram", "itself"]
    assert len(report["break_even"]) == 6  # evaluate's own, for each K
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    write_report(report, tmp_path)


def run_of(label, k, rows, speedup, error=0.0):
    """A measured run as far as the summary reads it."""
    predicted = {"speedup": 1.0, "tau": 1.0, "error": error}
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    return {
        **{"label": f"{label} k={k}", "draft": "eagle3", "k": k, "concurrency": rows, "speedup": speedup},
        **{"mode": "greedy", "sampling": sampling, "predicted": predicted},
    }


def test_the_summary_by_hand():
    """Predicted S: 1.5 / 1.1 at K = 1 and 1.8 / 1.2 at K = 2 alone; at 4 requests 1.5 / 1.6 and 1.8 / 2.2."""
    runs = [run_of("x", 1, 1, 1.4), run_of("x", 2, 1, 1.3, 0.2), run_of("x", 1, 4, 0.8, -0.1), run_of("x", 2, 4, 0.9)]
    key = _key(runs[0])
    assert key[0] == "x" and key[2] == 1 and _key(runs[2]) == (*key[:2], 4)
    rates = {2: (0.5, 0.3)}
    models = {
        key: CostModel(rates, (0.0, 0.1), {1: 1.0, 3: 1.0}, concurrency=1),
        (*key[:2], 4): CostModel(rates, (0.0, 0.1), {1: 1.0, 2: 1.5, 3: 2.0}, concurrency=4),
    }
    tokens_ = dict.fromkeys((key[1:], (key[1], 4)), 10**9)
    found = _findings(runs, models, tokens_, [Candidate("x", "eagle3", NgramProposer, True, "drafts/x")], key[1])
    assert found["median_error"] == pytest.approx(0.05)
    expected = {"k": 2, "predicted": 1.5, "measured": 1.3, "measured_k": 1, "measured_best": 1.4}
    assert found["best"]["1"]["x"] == pytest.approx(expected)
    plain = {"k": 0, "predicted": 1.0, "measured": 1.0, "measured_k": 0, "measured_best": 1.0}
    assert found["best"]["4"]["x"] == plain
    costs = found["costs"]["4"]["x"]
    assert (costs["c"], costs["v"], costs["o"]) == (pytest.approx(0.1), pytest.approx([1.0, 1.5, 2.0]), 0.0)
    (even,) = found["break_even"]
    assert even["predicted"] == pytest.approx(4 ** (0.5 / (1.5 - 1.5 / 1.6)))
    assert even["measured"] == pytest.approx(math.exp(math.log(4) * 0.4 / 0.5))
    settings = found["settings"]["x"]
    assert settings["best_k"] == {"1": 1, "4": 0}
    assert settings["vllm"]["num_speculative_tokens_per_batch_size"] == [[1, 1, 1], [2, 4, 0]]


def test_the_table_names_every_run(tuned):
    report, _ = tuned
    stream = io.StringIO()
    print_tune(report, Console(file=stream, width=120))
    text = stream.getvalue()
    for run in report["runs"]:
        if run["draft"] != "none":
            assert run["label"] in text and f"{run['predicted']['error']:+.1%}" in text
    assert "concurrency 3" in text and f"{report['tune']['median_error']:.1%}" in text
    assert text.count("best K predicted") == 4 and text.count("break-even") == 2


def test_a_prediction_may_not_see_what_it_predicts(target):
    for calibration in ([], TEST[:1]):
        with pytest.raises(EvaluationError, match="expected at least one"):
            tune(target, [NGRAM], calibration, TEST, ks=[1], say=lambda line: None)


def test_ctrl_c_while_calibrating_leaves_nothing_half_done(target):
    class Interrupted(NgramProposer):
        def propose(self, k, stop=None):
            if len(self._texts[0]) > 12:
                raise KeyboardInterrupt
            return super().propose(k, stop)

    with pytest.raises(KeyboardInterrupt):
        tune(target, [Candidate("x", "ngram", Interrupted)], CALIBRATION, TEST, ks=[1], say=lambda line: None)


def prompts_file(folder, name, first):
    rows = [{"prompt": f"w{first + i} w{i + 3} w{i}"} for i in range(6)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


def test_calibration_prompts_are_others(tmp_path):
    target = make_target(tokenizer=make_tokenizer())
    test, other = prompts_file(tmp_path, "test", 0), prompts_file(tmp_path, "other", 20)
    settings = EvaluationConfig(num_prompts=2, prompts=test)
    first, measured, name = tuning_prompts(target, settings, other)
    assert name == "test" and len(first) == len(measured) == 2
    assert measured == named_prompts(test, target, "auto", 2, 0, settings.max_new_tokens)
    assert first == named_prompts(other, target, "auto", 2, 0, settings.max_new_tokens)
    turns = [Prompt((1,), "a", "x"), Prompt((1, 2), "a", "x"), Prompt((3,), "a", "y"), Prompt((4,), "b", "z")]
    assert _halves(turns) == ([turns[2]], [turns[0], turns[1], turns[3]])  # by unit, in each category
    every_second = tuning_prompts(target, settings)
    four = named_prompts(test, target, "auto", 4, 0, settings.max_new_tokens)
    assert every_second[:2] == (four[1::2], four[::2])
    assert tuning_prompts(target, settings, test)[0] == []  # the same prompts: none is left to calibrate on


def test_tune_draft_from_files(tmp_path):
    target = make_target(tokenizer=make_tokenizer())
    (folder := tmp_path / "draft").mkdir()
    agreeable_draft(target).save_pretrained(folder)
    settings = EvaluationConfig(k=[1, 2], max_new_tokens=6, num_prompts=2, prompts=prompts_file(tmp_path, "test", 0))
    report = tune_draft(folder, target, settings, concurrency=[2], say=lambda line: None)
    assert report["prompts"]["count"] == 2 and report["tune"]["calibration"]["prompts"] == 2
    labels = {run["label"] for run in report["runs"]}
    assert labels == {"plain", *(f"{draft} k={k}" for draft in ("n-gram", "eagle3") for k in (1, 2))}
    assert report["tune"]["settings"]["eagle3"]["best_k"].keys() == {"2"}


def test_sampled_runs_have_models_of_their_own(target):
    samplings = [Sampling(), Sampling(temperature=0.9, seed=1)]
    report = tune(
        target,
        [NGRAM],
        CALIBRATION[:1],
        TEST[:1],
        ks=[2],
        samplings=samplings,
        max_new_tokens=6,
        certificate=False,
        say=lambda line: None,
    )
    assert [run["mode"] for run in report["runs"] if "predicted" in run] == ["greedy", "one_hot"]
    assert set(report["tune"]["best"]["1"]) == {"n-gram"}
