"""What an evaluation takes and refuses: seeds, order, Ctrl-C, drafts and prompts of every form, stops, errors."""

from collections import Counter
from functools import partial

import pytest
import torch

from drafttrain import evaluate as public_evaluate
from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate import runner
from drafttrain.evaluate.report import EvaluationError, write_report
from drafttrain.evaluate.runner import Candidate, Prompt
from drafttrain.evaluate.runner import evaluate as evaluate_with_certificate
from drafttrain.nn.sampling import Sampling
from tests.tiny_drafts import Oracle, SelfProposer, make_batch, make_draft, make_target, plain, train
from tests.tiny_models import make_tokenizer, tokens

evaluate = partial(evaluate_with_certificate, certificate=False)
PROMPTS = [row.tolist() for row in tokens(3, 6)]
ONE_HOT = Sampling(temperature=0.9, seed=3)
DRAWN = Sampling(temperature=0.9, seed=3, draft_mode="probabilistic")


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer())


@pytest.fixture(scope="module")
def draft(target):
    """One that has learned the target's continuation of the first prompt."""
    learner = make_draft(target)
    ids = torch.tensor([PROMPTS[0] + plain(target, [PROMPTS[0]], 14)[0]])
    train(learner, make_batch(target, ids, torch.arange(ids.shape[1])[None] >= len(PROMPTS[0])), 40)
    return learner


def all_texts(target, drafts, samplings, **options):
    """Tokens of every configuration and prompt, and the report's counts."""
    texts, generate = Counter(), runner.generate

    def spy(target_, prompts, proposer, **arguments):
        done = generate(target_, prompts, proposer, **arguments)
        key = (arguments["sampling"], proposer is None, arguments["k"], arguments["requests"][0])
        texts[(key, tuple(done.generations[0].tokens))] += 1
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "generate", spy)
        report = evaluate(target, drafts, PROMPTS[:2], k=[2], samplings=samplings, stop_ids=(), **options)
    counts = [(run["id"], run["iterations"], run["accepted_tokens"], run["emitted_tokens"]) for run in report["runs"]]
    return texts, counts


def test_a_seed_gives_the_same_texts_and_counts(target, draft):
    def once(seed):
        samplings = [Sampling(temperature=1.0, seed=seed, draft_mode="probabilistic")]
        return all_texts(target, draft, samplings, max_new_tokens=8, ngram=False)

    assert once(0) == once(0)
    assert once(0)[0] != once(1)[0]


def test_every_prompt_runs_through_all_configurations_in_a_new_order(target):
    labels = []
    evaluate(
        target,
        {},
        PROMPTS,
        k=[1, 2, 3, 4],
        max_new_tokens=2,
        stop_ids=(),
        progress=lambda done, label: labels.append((done, label)),
    )
    assert [done for done, _ in labels] == list(range(16)) and labels[-1] == (15, "done")
    blocks = [[label for _, label in labels[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(block) == ["n-gram k=1", "n-gram k=2", "n-gram k=3", "n-gram k=4", "plain"] for block in blocks)
    assert len({tuple(block) for block in blocks}) == 3


@pytest.mark.parametrize("stop_at", [4, 5])
def test_ctrl_c_keeps_the_prompts_that_are_whole(target, stop_at):
    """Two configurations a prompt: the interrupt falls before or within the third prompt."""

    def progress(done, label):
        if done == stop_at:
            raise KeyboardInterrupt

    report = evaluate(target, {}, PROMPTS, k=[2], max_new_tokens=6, stop_ids=(), progress=progress)
    assert report["prompts"]["count"] == 2
    assert [run["emitted_tokens"] for run in report["runs"]] == [12, 12]
    for run in report["runs"]:
        speed = run["tokens_per_second"]
        assert speed["median"] == pytest.approx((speed["min"] + speed["max"]) / 2)


def test_ctrl_c_within_the_first_prompt_is_passed_on(target):
    def progress(done, label):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(target, {}, PROMPTS, k=[2], max_new_tokens=6, stop_ids=(), progress=progress)


def test_drafts_as_a_draft_a_dict_or_candidates(target, draft):
    options = {"k": [2], "max_new_tokens": 6, "stop_ids": (), "ngram": False}
    one = public_evaluate(target, draft, PROMPTS[:1], **options)
    named = evaluate(target, {"first": draft, "second": make_draft(target, seed=1)}, PROMPTS[:1], **options)
    listed = evaluate(target, [Candidate("lookup", "ngram", NgramProposer, ks=(1, 4))], PROMPTS[:1], **options)
    assert [run["label"] for run in one["runs"]] == ["plain", "eagle3 k=2"]
    assert [run["label"] for run in named["runs"]] == ["plain", "first k=2", "second k=2"]
    assert [run["label"] for run in listed["runs"]] == ["plain", "lookup k=1", "lookup k=4"]
    first, second = (run["accepted_tokens"] for run in named["runs"][1:])
    assert first == one["runs"][1]["accepted_tokens"] != second
    assert one["runs"][1]["intervals"] == {"mean_acceptance_length": None, "speedup": None}  # of a single prompt
    assert one["prompts"]["train_overlap"] is None and one["prompts"]["name"] == "prompts"


def test_prompts_as_text_ids_or_prompt_objects(target):
    words = "w1 w2 w3 w4"
    ids = target.tokenizer(words)["input_ids"]
    given = [words, ids, Prompt(tuple(ids))]
    texts, generate = [], runner.generate

    def spy(target_, prompts, *args, **options):
        texts.append(list(prompts[0]))
        return generate(target_, prompts, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "generate", spy)
        evaluate(target, {}, given, k=[1], max_new_tokens=2, stop_ids=())
    assert len(ids) == 4 and all(text == ids for text in texts)


def test_repeated_share_is_that_of_the_greedy_plain_text(target, monkeypatch):
    """12 tokens that repeat after 10: of the 5 runs of 8 tokens none was there before; after 2 all but 2 were."""
    generate = runner.generate

    def looping(target_, prompts, proposer, *, requests, sampling, **options):
        done = generate(target_, prompts, proposer, requests=requests, sampling=sampling, **options)
        period = 10 if requests == [0] else 2
        if proposer is None and sampling.greedy:
            done.generations[0].tokens = [50 + i % period for i in range(12)]
        return done

    monkeypatch.setattr(runner, "generate", looping)
    samplings = [ONE_HOT, Sampling()]
    report = evaluate(target, {}, PROMPTS[:2], k=[1], samplings=samplings, max_new_tokens=12, stop_ids=())
    assert report["prompts"]["repeated_8gram_share"] == 3 / 10


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "probabilistic"])
def test_the_target_as_its_own_draft_is_always_accepted(target, sampling):
    same = Candidate("itself", "oracle", lambda: SelfProposer(target))
    report = evaluate(
        target, [same], PROMPTS[:2], k=[3], samplings=[sampling], max_new_tokens=13, stop_ids=(), ngram=False
    )
    run = report["runs"][1]
    assert (run["iterations"], run["accepted_tokens"], run["emitted_tokens"]) == (6, 18, 26)
    assert (run["acceptance_rate"], run["mean_acceptance_length"]) == (1.0, 4.0)
    assert run["per_position_acceptance"] == run["conditional_acceptance"] == [1.0, 1.0, 1.0]


def test_an_oracle_right_for_one_draft_of_three(target):
    text = plain(target, PROMPTS[:1], 40)
    half = Candidate("half", "oracle", lambda: Oracle(text, right=1))
    run = evaluate(target, [half], PROMPTS[:1], k=[3], max_new_tokens=13, stop_ids=(), ngram=False)["runs"][1]
    assert (run["iterations"], run["drafted_tokens"], run["accepted_tokens"]) == (6, 18, 6)
    assert run["per_position_acceptance"] == [1, 0, 0] and run["conditional_acceptance"] == [1, 0, None]


def test_samplings_that_differ_in_any_setting_are_kept_apart(target):
    samplings = [Sampling(0.8, top_p=0.9), Sampling(0.8), Sampling(0.8, top_k=5), Sampling()]
    report = evaluate(target, {}, PROMPTS[:1], k=[1], samplings=samplings, max_new_tokens=3, stop_ids=())
    plain_ids = [run["id"] for run in report["runs"] if run["draft"] == "none"]
    assert plain_ids == ["plain-t0.8-p0.9-one-hot", "plain-t0.8-one-hot", "plain-t0.8-top5-one-hot", "plain"]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        (PROMPTS, {"k": []}, r"k is \[\]"),
        (PROMPTS, {"k": [3, 0]}, r"k is \[3, 0\].*plain baseline is always run"),
        (PROMPTS, {"samplings": []}, "no samplings"),
        (PROMPTS, {"samplings": [Sampling(), Sampling()]}, "several configurations are named n-gram-k1.*plain"),
        (PROMPTS, {"max_new_tokens": 1}, "max_new_tokens is 1; expected at least 2"),
        ([PROMPTS[0], [5] * 250], {"max_new_tokens": 8}, "prompt 1 has 250 tokens; expected at most 249"),
    ],
)
def test_errors(target, prompts, options, message):
    with pytest.raises(EvaluationError, match=message):
        evaluate(target, {}, prompts, **{"k": [1], **options})


def test_labels_that_clash_and_text_without_a_tokenizer(target):
    twice = [Candidate("n-gram", "ngram", NgramProposer)]
    with pytest.raises(EvaluationError, match="several configurations are named n-gram-k1"):
        evaluate(target, twice, PROMPTS, k=[1])
    with pytest.raises(EvaluationError, match="tiny Llama has no tokenizer"):
        evaluate(make_target(), {}, ["w1 w2"], k=[1])


def test_a_prompt_that_just_fits(target):
    report = evaluate(target, {}, [[5] * 249], k=[3], max_new_tokens=8, stop_ids=())
    assert [run["emitted_tokens"] for run in report["runs"]] == [8, 8]


def test_outputs_that_end_at_once_have_no_speed(target, tmp_path):
    """Every first token is a stop: nothing is decoded after the prefill, and nothing is divided by zero."""
    stops = [plain(target, [prompt], 1)[0][0] for prompt in PROMPTS]
    report = evaluate(target, {}, [Prompt(tuple(p), "all") for p in PROMPTS], k=[2], stop_ids=stops)
    for run in report["runs"]:
        assert (run["emitted_tokens"], run["iterations"], run["mean_acceptance_length"]) == (3, 0, 1.0)
        assert run["speedup"] is None and run["c"] is None and run["tokens_per_second"]["median"] is None
        assert run["intervals"] == {"mean_acceptance_length": None, "speedup": None}
    write_report(report, tmp_path)


def test_some_outputs_that_end_at_once(target, tmp_path):
    stop = plain(target, [PROMPTS[0]], 1)[0]
    report = evaluate(target, {}, PROMPTS, k=[2], max_new_tokens=10, stop_ids=stop)
    run = report["runs"][1]
    assert run["identical_to_plain"] is True and run["speedup"] > 0 and run["tokens_per_second"]["min"] > 0
    write_report(report, tmp_path)
