"""The report of tiny targets: every figure recomputed from the decoded results, order, errors, and Ctrl-C."""

import json
import statistics

import pytest
import torch

from drafttrain.evaluate import runner
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.runner import Candidate, Prompt, evaluate
from drafttrain.nn.sampling import Sampling
from tests.tiny_drafts import make_batch, make_draft, make_target, plain, train
from tests.tiny_models import make_tokenizer, tokens

COUNT = 14
PROMPTS = [row.tolist() for row in tokens(3, 6)]
ONE_HOT = Sampling(temperature=0.9, seed=3)
DRAWN = Sampling(temperature=0.9, seed=3, draft_mode="probabilistic")
RUN_KEYS = {
    *(
        "id",
        "label",
        "draft",
        "checkpoint",
        "trained",
        "baseline",
        "mode",
        "sampling",
        "k",
        "tree",
        "policy",
        "quantization",
    ),
    *("concurrency", "iterations", "draft_rounds", "drafted_tokens", "accepted_tokens", "emitted_tokens"),
    *("acceptance_rate", "mean_acceptance_length", "per_position_acceptance", "conditional_acceptance", "intervals"),
    *("tokens_per_second", "end_to_end_tokens_per_second", "ttft", "speedup", "ideal_speedup", "c", "v", "o"),
    *("seconds", "categories", "identical_to_plain", "divergences", "lossy", "synthetic", "prompts", "draft_lengths"),
    *("rounds", "itl", "peak_memory_bytes"),
}


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer())


@pytest.fixture(scope="module")
def trained(target):
    """A draft that has learned the target's continuation of the first prompt."""
    draft = make_draft(target)
    ids = torch.tensor([PROMPTS[0] + plain(target, [PROMPTS[0]], COUNT)[0]])
    mask = torch.arange(ids.shape[1])[None] >= len(PROMPTS[0])
    train(draft, make_batch(target, ids, mask), 40)
    return draft


@pytest.fixture(scope="module")
def measured(target, trained):
    """(report, decoded results by run id in prompt order), from one evaluation with each kind of draft and sampling."""
    seen, generate = {}, runner.generate

    def spy(target_, prompts, proposer, *, requests, max_new_tokens, **options):
        done = generate(target_, prompts, proposer, requests=requests, max_new_tokens=max_new_tokens, **options)
        if max_new_tokens == COUNT:  # not the warm-up
            seen.setdefault((options["sampling"], id(proposer)), []).append((requests[0], done))
        return done

    made, plan = {}, runner._plan

    def remember(*args):
        runs = plan(*args)
        made.update({run.id: (run.sampling, id(run.proposer)) for run in runs})
        return runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "generate", spy)
        patch.setattr(runner, "_plan", remember)
        report = evaluate(
            target,
            [
                Candidate(
                    "untrained eagle3", "eagle3", lambda: make_draft(target, seed=1).proposer(target), False, ks=(2,)
                ),
                Candidate("eagle3", "eagle3", lambda: trained.proposer(target), True, "runs/tiny"),
            ],
            [Prompt(tuple(PROMPTS[0]), "code"), Prompt(tuple(PROMPTS[1]), "chat"), Prompt(tuple(PROMPTS[2]), "code")],
            k=[3, 1, 3],
            samplings=[Sampling(), ONE_HOT, DRAWN],
            max_new_tokens=COUNT,
            stop_ids=(),
            name="by hand",
            training_rows=[PROMPTS[1], [1, 2]],
            recipe={"method": "eagle3"},
        )
    results = {}
    for run_id, key in made.items():
        assert [index for index, _ in seen[key]] == [0, 1, 2]
        results[run_id] = [done for _, done in seen[key]]
    return report, results


def run_of(report, run_id):
    return next(run for run in report["runs"] if run["id"] == run_id)


def test_every_key_of_the_schema_is_there(measured, target):
    report, _ = measured
    assert report["schema"] == 1 and report["certificate"]["passed"] and report["interrupted"] is False
    assert report["target"] == {"name": "tiny Llama", "fingerprint": target.fingerprint}
    assert report["device"].pop("peak_memory_bytes") > 2**20
    about = {"name": "CPU", "dtype": "float32", "threads": torch.get_num_threads(), "capture": "none: cpu"}
    assert report["device"] == about
    assert {name: report["prompts"][name] for name in ("name", "count", "requested", "max_new_tokens")} == {
        "name": "by hand",
        "count": 3,
        "requested": 3,
        "max_new_tokens": COUNT,
    }
    assert report["prompts"]["train_overlap"] == pytest.approx(1 / 3)
    assert set(report["provenance"]) == {"command", "versions", "recipe"}
    assert report["provenance"]["recipe"] == {"method": "eagle3"} and "torch" in report["provenance"]["versions"]
    for run in report["runs"]:
        assert set(run) == RUN_KEYS
        assert {"prefill", "draft", "verify", "rest"} <= set(run["seconds"])
        assert set(run["intervals"]) == {"mean_acceptance_length", "speedup"}
        assert {"median", "min", "max"} <= set(run["tokens_per_second"])
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_configurations_and_baselines(measured):
    report, _ = measured
    names = ["plain", "n-gram-k1", "n-gram-k3", "untrained-eagle3-k2", "eagle3-k1", "eagle3-k3"]
    suffixes = ["", "-t0.9-one-hot", "-t0.9-probabilistic"]
    assert [run["id"] for run in report["runs"]] == [name + suffix for suffix in suffixes for name in names]
    for run in report["runs"]:
        kind, _, rest = run["id"].partition("-t0.9-")
        is_plain = kind == "plain"
        assert run["baseline"] == (None if is_plain else "plain" + run["id"].removeprefix(kind))
        assert run["mode"] == (rest.replace("-", "_") or "greedy")
        greedy = not rest
        assert run["sampling"] == {
            "temperature": 0.0 if greedy else 0.9,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 0 if greedy else 3,
        }
        expected = {"plain": ("none", False, None), "n-gram": ("ngram", False, None)}
        facts = expected.get(kind.rsplit("-k", 1)[0], ("eagle3", kind.startswith("eagle3"), None))
        facts = (*facts[:2], "runs/tiny") if kind.startswith("eagle3") else facts
        assert (run["draft"], run["trained"], run["checkpoint"]) == facts
        assert run["label"] == ("plain" if is_plain else kind.replace("untrained-", "untrained ").replace("-k", " k="))
        assert run["k"] == (0 if is_plain else int(kind[-1]))
        assert run["concurrency"] == 1 and run["tree"] is None and run["policy"] is None


def test_counts_add_up(measured):
    report, results = measured
    for run in report["runs"]:
        generations = [done.generations[0] for done in results[run["id"]]]
        assert run["emitted_tokens"] == sum(len(one.tokens) for one in generations) == 3 * COUNT
        assert run["iterations"] == sum(one.counts.iterations for one in generations)
        assert run["drafted_tokens"] <= run["iterations"] * run["k"]
        assert run["accepted_tokens"] <= run["drafted_tokens"]
        tau, positions = run["mean_acceptance_length"], run["per_position_acceptance"]
        assert tau == pytest.approx(1 + sum(positions)) == pytest.approx(1 + run["accepted_tokens"] / run["iterations"])
        # Every iteration yields its accepted drafts and one more, the last one may be cut.
        assert run["iterations"] * tau >= run["emitted_tokens"] - 3
        assert run["iterations"] * tau - (run["emitted_tokens"] - 3) <= 3 * run["k"]
        assert positions == sorted(positions, reverse=True) and len(positions) <= run["k"]
        before = [1.0, *positions]
        for i, rate in enumerate(run["conditional_acceptance"]):
            assert rate == (pytest.approx(positions[i] / before[i]) if before[i] else None)
        if run["draft"] == "none":
            assert (run["iterations"], run["draft_rounds"], run["drafted_tokens"]) == (3 * (COUNT - 1), 0, 0)
            assert run["acceptance_rate"] is None and positions == []
        elif run["draft"] == "eagle3":
            assert run["draft_rounds"] == run["iterations"] and run["drafted_tokens"] == run["iterations"] * run["k"]
        if run["drafted_tokens"]:
            assert run["acceptance_rate"] == run["accepted_tokens"] / run["drafted_tokens"]
    assert run_of(report, "eagle3-k3")["accepted_tokens"] > run_of(report, "untrained-eagle3-k2")["accepted_tokens"]


def test_speeds_by_a_second_method(measured):
    """From the seconds and tokens of each prompt, and again from the report's own totals."""
    report, results = measured
    for run in report["runs"]:
        own, plain_run = results[run["id"]], run_of(report, run["baseline"] or run["id"])
        spent = [d.seconds.begin + d.seconds.draft + d.seconds.verify + d.seconds.rest for d in own]
        rates = [(COUNT - 1) / s for s in spent]
        speed = run["tokens_per_second"]
        assert speed["median"] == pytest.approx(statistics.median(rates))
        assert (speed["min"], speed["max"]) == pytest.approx((min(rates), max(rates)))
        assert run["ttft"] == pytest.approx(sum(d.seconds.prefill for d in own) / 3)

        def decode(one):
            return sum(one["seconds"][name] for name in ("begin", "draft", "verify", "rest"))

        assert decode(run) == pytest.approx(sum(spent))
        assert speed["pooled"] == pytest.approx((run["emitted_tokens"] - 3) / decode(run))
        whole = decode(run) + run["seconds"]["prefill"]
        assert run["end_to_end_tokens_per_second"] == pytest.approx(run["emitted_tokens"] / whole)
        if run["draft"] == "none":
            assert run["speedup"] is None and run["ideal_speedup"] is None
            continue
        assert run["speedup"] == pytest.approx(decode(plain_run) / decode(run))  # equally many tokens
        low, high = run["intervals"]["speedup"]
        assert low <= run["speedup"] <= high
        low, high = run["intervals"]["mean_acceptance_length"]
        assert low <= run["mean_acceptance_length"] <= high


def test_costs_explain_the_speedup(measured):
    """speedup = tokens an iteration / (v + K c + o + the proposer's reading of the prompt), exactly."""
    report, _ = measured
    for run in report["runs"]:
        plain_run, seconds = run_of(report, run["baseline"] or run["id"]), run["seconds"]
        step = sum(plain_run["seconds"][n] for n in ("begin", "draft", "verify", "rest")) / plain_run["iterations"]
        reading = seconds["begin"] / run["iterations"] / step
        if run["draft"] == "none":
            assert run["v"] + run["o"] + reading == pytest.approx(1) and run["c"] is None and reading < 0.01
            continue
        assert run["c"] == pytest.approx(seconds["draft"] / run["iterations"] / run["k"] / step)
        assert run["v"] == pytest.approx(seconds["verify"] / run["iterations"] / step)
        assert run["o"] == pytest.approx(seconds["rest"] / run["iterations"] / step)
        tokens_an_iteration = (run["emitted_tokens"] - 3) / run["iterations"]
        cost = run["v"] + run["k"] * run["c"] + run["o"] + reading
        assert run["speedup"] == pytest.approx(tokens_an_iteration / cost)
        assert run["ideal_speedup"] == pytest.approx(run["mean_acceptance_length"] / (1 + run["k"] * run["c"]))


def test_categories(measured):
    report, results = measured
    for run in report["runs"]:
        assert set(run["categories"]) == {"chat", "code"}
        own = [results[run["id"]][i] for i in (0, 2)]
        base = [results[run["baseline"] or run["id"]][i] for i in (0, 2)]
        code = run["categories"]["code"]
        accepted, iterations = (sum(getattr(done.counts, name) for done in own) for name in ("accepted", "iterations"))
        assert code["prompts"] == 2 and code["mean_acceptance_length"] == pytest.approx(1 + accepted / iterations)
        expected = sum(done.seconds.decode for done in base) / sum(done.seconds.decode for done in own)
        assert code["speedup"] == (pytest.approx(expected) if run["baseline"] else None)


def test_greedy_runs_equal_plain_decoding(measured):
    report, results = measured
    reference = [done.generations[0].tokens for done in results["plain"]]
    for run in report["runs"]:
        greedy_draft = run["mode"] == "greedy" and run["draft"] != "none"
        assert run["identical_to_plain"] is (True if greedy_draft else None) and run["divergences"] == []
        if run["mode"] == "greedy":
            assert [done.generations[0].tokens for done in results[run["id"]]] == reference


def test_the_report_can_be_written(measured, tmp_path):
    path, html = write_report(measured[0], tmp_path)
    assert json.loads(path.read_text())["runs"][5]["id"] == "eagle3-k3" and "eagle3 k=3" in html.read_text()


def test_a_divergence_is_reported(target, monkeypatch):
    """One verified token is planted wrong: the report says where, and by which margin."""
    generate, reference = runner.generate, plain(target, PROMPTS[:2], COUNT)

    def planted(target_, prompts, proposer, *, requests, **options):
        done = generate(target_, prompts, proposer, requests=requests, **options)
        if proposer is not None and requests == [1] and len(done.generations[0].tokens) == COUNT:
            done.generations[0].tokens[4] = (done.generations[0].tokens[4] + 1) % 99
        return done

    monkeypatch.setattr(runner, "generate", planted)
    report = evaluate(target, {}, PROMPTS[:2], k=[2], max_new_tokens=COUNT, stop_ids=())
    run = run_of(report, "n-gram-k2")
    assert run["identical_to_plain"] is False and len(run["divergences"]) == 1
    found = run["divergences"][0]
    token = reference[1][4]
    assert (found["prompt"], found["position"]) == (1, 4)
    assert (found["token"], found["plain_token"]) == ((token + 1) % 99, token) and found["margin"] > 0


def test_modes_of_sampling_draft_and_verify_differently(measured):
    """One-hot drafts are the draft's argmax; probabilistic ones are drawn. Both are counted, neither is compared."""
    report, results = measured
    for mode in ("one-hot", "probabilistic"):
        run = run_of(report, f"eagle3-k3-t0.9-{mode}")
        assert run["identical_to_plain"] is None and run["drafted_tokens"] == 3 * run["iterations"]
    texts = {
        mode: [done.generations[0].tokens for done in results[f"eagle3-k3-t0.9-{mode}"]]
        for mode in ("one-hot", "probabilistic")
    }
    assert texts["one-hot"] != texts["probabilistic"]
    plain_texts = [
        [done.generations[0].tokens for done in results[f"plain-t0.9-{mode}"]] for mode in ("one-hot", "probabilistic")
    ]
    assert plain_texts[0] == plain_texts[1]  # plain sampling drafts nothing
