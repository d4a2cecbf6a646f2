"""Concurrency, repeats, trees, policies, lossy rules and paired comparisons in a report, by a second computation."""

from functools import partial

import pytest

from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate import runner
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.run import labels_of
from drafttrain.evaluate.runner import Candidate, Prompt
from drafttrain.evaluate.runner import evaluate as evaluate_with_certificate
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.specdec.policy import Confidence
from drafttrain.specdec.verify import Synthetic, Typical
from tests.tiny_drafts import Oracle, agreeable_draft, make_target, plain
from tests.tiny_models import tokens

evaluate = partial(evaluate_with_certificate, certificate=False, stop_ids=())
PROMPTS = [row.tolist() for row in tokens(5, 6)]
COUNT = 9


@pytest.fixture(scope="module")
def target():
    return make_target()


def oracle(target, right, label):
    """A draft that is right for the first `right` tokens of each round, whatever the prompts of the batch."""
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain(target, PROMPTS, 60), strict=True)}

    class Knowing(Oracle):
        def __init__(self):
            super().__init__([], right)

        def begin(self, step, next_token, sampling, streams):
            rows = zip(step.tokens.tolist(), step.lengths.tolist(), strict=True)
            self.texts = [texts[tuple(row[:length])] for row, length in rows]
            super().begin(step, next_token, sampling, streams)

    return Candidate(label, "eagle3", Knowing, checkpoint=label)


def test_every_concurrency_has_its_baseline_and_the_same_acceptance(target):
    report = evaluate(target, [oracle(target, 2, "two")], PROMPTS, k=[3], concurrency=[4, 1, 2], max_new_tokens=COUNT)
    runs = {run["id"]: run for run in report["runs"]}
    assert list(runs) == [
        f"{name}{suffix}" for suffix in ("", "-c2", "-c4") for name in ("plain", "n-gram-k3", "two-k3")
    ]
    for run in report["runs"]:
        assert run["prompts"] == 5 and run["emitted_tokens"] == 5 * COUNT
        suffix = f"-c{run['concurrency']}" if run["concurrency"] > 1 else ""
        assert run["baseline"] == (None if run["draft"] == "none" else f"plain{suffix}")
        speeds = run["tokens_per_second"]
        assert speeds["total"] == pytest.approx(run["concurrency"] * speeds["pooled"])
        if run["draft"] == "eagle3":
            assert run["mean_acceptance_length"] == 3 and run["identical_to_plain"]
            base = runs[run["baseline"]]["tokens_per_second"]
            assert run["speedup"] == pytest.approx(speeds["pooled"] / base["pooled"])
            # 1 token from the prefill, 3 a round: ceil(8 / 3) rounds for each of ceil(5 / c) batches.
            assert run["rounds"] == 3 * -(-5 // run["concurrency"])
    assert {entry["label"] for entry in report["break_even"]} == {"two k=3", "n-gram k=3"}
    assert report["interrupted"] is False


def test_gaps_and_time_to_the_first_token(target):
    report = evaluate(target, {}, PROMPTS, k=[2], max_new_tokens=COUNT, concurrency=[2])
    for run in report["runs"]:
        assert 0 < run["itl"]["p50"] <= run["itl"]["p95"] and run["ttft"] > 0
        assert run["peak_memory_bytes"] is None  # The process's is in report["device"].


def test_repeats_are_passes_of_the_same_texts(target):
    once, twice = (
        evaluate(target, [oracle(target, 1, "one")], PROMPTS[:2], k=[2], repeats=n, max_new_tokens=COUNT, ngram=False)
        for n in (1, 3)
    )
    for a, b in zip(once["runs"], twice["runs"], strict=True):
        assert (a["iterations"], a["accepted_tokens"], a["prompts"]) == (b["iterations"], b["accepted_tokens"], 2)
        assert b["rounds"] == 3 * a["rounds"]
        assert b["tokens_per_second"]["min"] <= b["tokens_per_second"]["median"] <= b["tokens_per_second"]["max"]


def test_trees_policies_and_lossy_rules_are_named(target):
    draft = agreeable_draft(target)
    tree, fixed = DynamicTree(3, 8), StaticTree.from_paths([[0], [1], [0, 0]])
    make = partial(draft.proposer, target)
    report = evaluate(
        target,
        [
            Candidate("eagle3", "eagle3", make),
            Candidate("eagle3", "eagle3", partial(draft.proposer, target, tree), tree=tree),
            Candidate("eagle3", "eagle3", partial(draft.proposer, target, fixed), tree=fixed, ks=(2,)),
            Candidate("eagle3", "eagle3", make, policy=lambda rows: Confidence(0.01)),
            Candidate("eagle3", "eagle3", make, acceptance=Typical()),
            Candidate("eagle3", "eagle3", make, acceptance=Synthetic((0.5, 0.25))),
        ],
        PROMPTS[:2],
        k=[2],
        max_new_tokens=COUNT,
        ngram=False,
    )
    runs = {run["label"]: run for run in report["runs"]}
    assert list(runs) == [
        "plain",
        "eagle3 k=2",
        "eagle3 tree 3x8 k=2",
        "eagle3 static tree of 3 k=2",
        "eagle3 confidence>=0.01 k=2",
        "eagle3 typical k=2",
        "eagle3 synthetic k=2",
    ]
    assert runs["eagle3 tree 3x8 k=2"]["tree"] == {"kind": "dynamic", "topk": 3, "nodes": 8}
    assert runs["eagle3 static tree of 3 k=2"]["tree"] == {"kind": "static", "parents": [-1, -1, 0]}
    assert runs["eagle3 confidence>=0.01 k=2"]["policy"] == "confidence>=0.01"
    for label, run in runs.items():
        lossy = label.split()[1:2] in (["typical"], ["synthetic"])
        assert run["lossy"] is lossy and run["synthetic"] is ("synthetic" in label)
        assert run["identical_to_plain"] is (None if lossy or label == "plain" else True)
        assert (run["acceptance_rate"] is None) == (label == "plain" or "tree" in label)
        assert sum(run["draft_lengths"]) == run["iterations"]


def test_turns_of_a_conversation_are_resampled_together(target):
    prompts = [Prompt(tuple(p), "chat", unit) for p, unit in zip(PROMPTS[:4], "aabb", strict=True)]
    alone = [Prompt(tuple(p), "chat", unit) for p, unit in zip(PROMPTS[:4], "aaaa", strict=True)]
    two, one = (
        evaluate(target, [oracle(target, 1, "one")], p, k=[2], max_new_tokens=COUNT, ngram=False)["runs"][1]
        for p in (prompts, alone)
    )
    assert two["intervals"]["speedup"] and one["intervals"]["speedup"] is None  # One unit has no spread.
    assert two["categories"]["chat"]["intervals"]["mean_acceptance_length"] == [2, 2]


def test_paired_differences_of_drafts(target):
    report = evaluate(
        target,
        [oracle(target, 2, "better"), oracle(target, 1, "worse")],
        PROMPTS,
        k=[2, 3],
        samplings=[Sampling()],
        max_new_tokens=13,
        ngram=False,
        compare=True,
    )
    assert [(c["a"], c["b"]) for c in report["comparisons"]] == [("better-k2", "worse-k2"), ("better-k3", "worse-k3")]
    speeds = {run["id"]: run["tokens_per_second"]["pooled"] for run in report["runs"]}
    for found in report["comparisons"]:
        assert found["tau_difference"] == {"value": 1, "interval": [1, 1]}
        ratio = found["speedup_ratio"]
        assert ratio["value"] == pytest.approx(speeds[found["a"]] / speeds[found["b"]])
        assert ratio["interval"][0] <= ratio["value"] <= ratio["interval"][1]


def test_ctrl_c_in_the_second_concurrency_keeps_the_first(target, monkeypatch):
    decode, calls = runner.generate, []

    def interrupted(*args, **kwargs):
        calls.append(len(args[1]))
        if calls.count(4) == 4:  # Two for the warm-up.
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    monkeypatch.setattr(runner, "generate", interrupted)
    report = evaluate(target, {}, PROMPTS, k=[2], concurrency=[1, 4], max_new_tokens=4)
    assert report["interrupted"] and [run["id"] for run in report["runs"]] == ["plain", "n-gram-k2"]
    assert report["prompts"]["count"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": [0]}, "concurrency is"),
        ({"concurrency": []}, "concurrency is"),
        ({"repeats": 0}, "at least one pass"),
        ({"prompts": [[5, 6], []]}, "prompt 1 is empty"),
        ({"k": [0, 2]}, "plain baseline is always run"),
    ],
)
def test_numbers_that_make_no_evaluation(target, options, message):
    given = {"prompts": PROMPTS, "k": [2], "max_new_tokens": 4, **options}
    with pytest.raises(EvaluationError, match=message):
        evaluate(target, {}, given.pop("prompts"), **given)


def test_k_beyond_what_a_draft_allows(target):
    class Short(NgramProposer):
        max_k = 2

    with pytest.raises(EvaluationError, match="drafts at most 2 tokens deep"):
        evaluate(target, [Candidate("short", "ngram", Short)], PROMPTS, k=[2, 3], max_new_tokens=4, ngram=False)


def test_labels_are_as_short_as_they_can_be_told_apart():
    assert labels_of(["runs/a", "runs/b"]) == {"a": "runs/a", "b": "runs/b"}
    assert labels_of(["x/draft", "y/draft"]) == {"x/draft": "x/draft", "y/draft": "y/draft"}
    with pytest.raises(EvaluationError, match="given twice"):
        labels_of(["runs/a", "runs/a"])
