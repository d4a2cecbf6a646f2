"""The decoding loop with proposers of known outcome: counts, stops, greedy identity, seeds, ragged rows."""

import math

import pytest
import torch

from drafttrain.drafts.ngram import NgramProposer
from drafttrain.nn.sampling import Sampling, SamplingError
from drafttrain.specdec.decode import GenerateError, generate
from drafttrain.target import TargetError
from tests.specdec.test_verify import p_value
from tests.tiny_drafts import Oracle, SelfProposer, agreeable_draft, make_draft, make_target, plain
from tests.tiny_models import V, make_tokenizer, tokens

PROMPT = tokens(1, 6)[0].tolist()
SHORT = PROMPT[:2]
RAGGED = [PROMPT, tokens(1, 11)[0].tolist(), SHORT]
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic", seed=5)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def text(target):
    """The plain greedy continuation of PROMPT."""
    return plain(target, [PROMPT], 60)[0]


def counted(generation):
    counts = generation.counts
    return counts.iterations, counts.draft_rounds, counts.drafted, counts.accepted, counts.emitted


@pytest.mark.parametrize("K", range(1, 8))
def test_an_oracle_needs_the_fewest_forwards(target, text, K):
    for N in (1, 2, 17, 22):
        done = generate(target, [PROMPT], Oracle([text], right=K), k=K, max_new_tokens=N, stop_ids=()).generations[0]
        forwards = math.ceil((N - 1) / (K + 1))
        assert done.tokens == text[:N] and done.finish == "length"
        assert counted(done) == (forwards, forwards, forwards * K, forwards * K, N)


@pytest.mark.parametrize("right", range(4))
def test_right_for_the_first_drafts(target, text, right):
    """K = 3: each round yields `right` drafts and one replacement or, when all stand, one bonus token."""
    done = generate(target, [PROMPT], Oracle([text], right), k=3, max_new_tokens=1 + 6 * (right + 1), stop_ids=())
    counts = done.counts
    assert done.generations[0].tokens == text[: 1 + 6 * (right + 1)]
    assert counted(done.generations[0])[:4] == (6, 6, 18, 6 * right)
    assert counts.mean_acceptance_length == 1 + right
    assert counts.per_position_acceptance == [1.0] * right + [0.0] * (3 - right)


def test_two_then_three_accepted(target, text):
    done = generate(target, [PROMPT], Oracle([text], [2, 3]), k=3, max_new_tokens=8, stop_ids=())
    assert counted(done.generations[0]) == (2, 2, 6, 5, 8)  # 7 tokens from 2 forwards, 1 from the prefill
    assert done.counts.mean_acceptance_length == 3.5 and done.counts.per_position_acceptance == [1, 1, 0.5]


def test_plain_decoding_counts_every_forward(target, text):
    done = generate(target, [PROMPT], max_new_tokens=9, stop_ids=()).generations[0]
    assert done.tokens == text[:9] and counted(done) == (8, 0, 0, 0, 9)


def first_new(text, start):
    """An index from `start` on whose token did not occur before it."""
    return next(i for i in range(start, len(text)) if text[i] not in text[:i])


@pytest.mark.parametrize("K", [1, 3, 7])
@pytest.mark.parametrize("right", [0, 1, 7])
def test_a_stop_ends_text_and_counts(target, text, K, right):
    at = first_new(text, 6)
    oracle = Oracle([text], right)
    done = generate(target, [PROMPT], oracle, k=K, max_new_tokens=50, stop_ids=[text[at], V + 5]).generations[0]
    assert done.tokens == text[: at + 1] and done.finish == "stop"
    per_round, left, drafted, accepted = min(right, K) + 1, at, 0, 0
    while left > 0:  # `left` tokens to come, the stop included
        inside = left <= per_round - 1  # the stop is one of the accepted drafts
        drafted += left if inside else K
        accepted += left if inside else per_round - 1
        left -= per_round
    assert counted(done) == (math.ceil(at / per_round), math.ceil(at / per_round), drafted, accepted, at + 1)


def test_a_stop_inside_an_accepted_run_by_hand(target, text):
    """Drafts [5, EOS, 7], all right: [5, EOS] come out, no bonus, and 7 counts nowhere."""
    assert len(set(text[:3])) == 3
    done = generate(target, [PROMPT], Oracle([text], 3), k=3, max_new_tokens=50, stop_ids=[text[2]]).generations[0]
    assert done.tokens == text[:3] and counted(done) == (1, 1, 2, 2, 3)
    assert done.counts.mean_acceptance_length == 3 and done.counts.per_position_acceptance == [1, 1]


def test_several_stop_ids_and_a_stop_at_once(target, text):
    at, later = first_new(text, 3), first_new(text, 9)
    done = generate(target, [PROMPT], Oracle([text], 2), k=2, stop_ids=[text[later], text[at]]).generations[0]
    assert done.tokens == text[: at + 1]
    first = generate(target, [PROMPT], Oracle([text], 2), k=2, stop_ids=[text[0]]).generations[0]
    assert first.tokens == text[:1] and first.finish == "stop" and counted(first) == (0, 0, 0, 0, 1)


def test_the_targets_own_stop_ids_are_the_default(text):
    target = make_target(eos_token_id=text[first_new(text, 4)])
    assert generate(target, [PROMPT], max_new_tokens=40).generations[0].tokens == text[: first_new(text, 4) + 1]


@pytest.mark.parametrize("right", [0, 2, 4])
def test_stop_strings(right):
    target = make_target(tokenizer=make_tokenizer())
    text = plain(target, [PROMPT], 40)[0]
    at = next(
        i for i in range(6, 30) if text[i] not in text[:i] and all(5 <= token < 95 for token in text[i - 1 : i + 1])
    )
    words = [f"w{token - 5}" for token in text[at - 1 : at + 1]]
    stop = "".join(words)[1:]  # across two tokens, from within the first
    done = generate(
        target, [PROMPT], Oracle([text], right), k=4, stop_ids=(), stop_strings=["never", stop], max_new_tokens=40
    ).generations[0]
    assert done.tokens == text[: at + 1] and done.finish == "stop"
    assert done.text == target.tokenizer.decode(text[: at + 1], skip_special_tokens=True).removesuffix(stop)
    assert done.text.endswith("w")


def test_max_new_tokens_cuts_the_text_but_not_the_acceptance(target, text):
    done = generate(target, [PROMPT], Oracle([text], 5), k=5, max_new_tokens=4, stop_ids=[text[5]]).generations[0]
    assert done.tokens == text[:4] and done.finish == "length"
    assert counted(done) == (1, 1, 5, 5, 4)  # the stop lies behind the cut: what was verified counts


def proposers(target, text, K):
    yield from (Oracle([text], right) for right in (0, 2, 9))
    yield NgramProposer(1, 3)
    yield make_draft(target, torch.arange(0, V, 3), norm_before_residual=True).proposer(target)
    if K == 4:
        yield from (NgramProposer(), SelfProposer(target), agreeable_draft(target).proposer(target))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "Mistral", "GptOss"])
def test_greedy_text_is_the_models_own_whatever_drafts(family):
    """Against transformers' generate with its own cache, in fp32. The sliding windows (4) are shorter than the text."""
    target = make_target(family)
    target.model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    own = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    text = own[0, len(PROMPT) :].tolist()
    assert plain(target, [PROMPT], 12) == [text[:12]]
    for K in range(1, 8):
        for proposer in proposers(target, text, K):
            done = generate(target, [PROMPT], proposer, k=K, max_new_tokens=12, stop_ids=()).generations[0]
            assert done.tokens == text[:12], (K, proposer)


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN])
def test_the_target_as_its_own_draft_is_always_accepted(target, sampling):
    done = generate(target, RAGGED, SelfProposer(target), k=4, sampling=sampling, max_new_tokens=21, stop_ids=())
    assert [counted(g) for g in done.generations] == [(4, 4, 16, 16, 21)] * 3
    if sampling.greedy:
        assert [g.tokens for g in done.generations] == plain(target, RAGGED, 21)


def drafting(name, target):
    return {
        "plain": lambda: None,
        "ngram": lambda: NgramProposer(1, 2),
        "self": lambda: SelfProposer(target),
        "eagle3": lambda: make_draft(target, torch.arange(0, V, 2)).proposer(target),
    }[name]()


ONE_HOT = Sampling(temperature=0.8, top_p=0.9, seed=5)


@pytest.mark.parametrize("sampling", [Sampling(), ONE_HOT, DRAWN], ids=["greedy", "one_hot", "probabilistic"])
@pytest.mark.parametrize("name", ["plain", "ngram", "self", "eagle3"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_rows_of_a_ragged_batch_equal_their_batch_of_one(family, name, sampling):
    target = make_target(family)
    stops = (7, 50)
    options = {"k": 3, "sampling": sampling, "max_new_tokens": 13, "stop_ids": stops}
    together = generate(target, RAGGED, drafting(name, target), **options)
    again = generate(target, RAGGED, drafting(name, target), **options)
    for row, prompt in enumerate(RAGGED):
        alone = generate(target, [prompt], drafting(name, target), requests=[row], **options).generations[0]
        for other in (together.generations[row], again.generations[row]):
            assert (alone.tokens, alone.finish, counted(alone)) == (other.tokens, other.finish, counted(other))
    assert together.counts.emitted == sum(len(g.tokens) for g in together.generations)


def test_logits_of_a_ragged_batch_equal_their_batch_of_one(target):
    def logits_by_position(prompts, row_of):
        seen = {}

        def observe(step):
            if len(step.tokens) == len(prompts) and step.logits.shape[1] == step.tokens.shape[1]:
                for column in range(step.tokens.shape[1]):
                    row = row_of(step)
                    seen[int(step.positions[row, column])] = step.logits[row, column]

        texts = plain(target, prompts, 30)
        generate(target, prompts, Oracle(texts, 3), k=3, max_new_tokens=13, stop_ids=(), observe=observe)
        return seen

    together, alone = logits_by_position(RAGGED, lambda step: 1), logits_by_position(RAGGED[1:2], lambda step: 0)
    assert len(alone) == 12 and together.keys() == alone.keys()
    for position, logits in alone.items():
        torch.testing.assert_close(together[position], logits, rtol=1e-4, atol=1e-4)


def test_seeds_decide(target):
    def run(seed, requests=None):
        sampling = Sampling(temperature=1.0, seed=seed)
        return [
            g.tokens
            for g in generate(
                target,
                [PROMPT] * 2,
                NgramProposer(1, 2),
                sampling=sampling,
                max_new_tokens=12,
                requests=requests,
                stop_ids=(),
            ).generations
        ]

    first = run(0)
    assert first[0] != first[1] and run(0) == first and run(1) != first
    assert run(0, [1, 0]) == first[::-1]


def test_sampled_pairs_are_distributed_as_plain_sampling_says():
    """20,000 requests of one prompt through the whole loop: the two tokens after the prefill's, chi-squared."""
    target = make_target(num_hidden_layers=1)
    draft = make_draft(target, layers=[0, 1])
    draft.initialise(torch.ones(draft.fc.in_features), target.final_norm.weight)
    expected = pair_distribution(target).flatten()
    rare = expected * 20_000 < 50

    def pooled(cells):
        return torch.cat([cells[~rare][:1] + cells[rare].sum(), cells[~rare][1:]])

    for mode in ("one_hot", "probabilistic"):
        sampling = Sampling(temperature=0.7, top_k=3, draft_mode=mode)
        done = generate(
            target, [SHORT] * 20_000, draft.proposer(target), k=2, sampling=sampling, max_new_tokens=3, stop_ids=()
        )
        assert 0.02 < done.counts.acceptance_rate < 0.98
        pairs = torch.tensor([g.tokens for g in done.generations])[:, 1:]
        counts = torch.bincount(V * pairs[:, 0] + pairs[:, 1], minlength=V * V).double()
        assert counts[expected == 0].eq(0).all()
        assert p_value(pooled(counts), 20_000 * pooled(expected)) > 1e-4


def pair_distribution(target):
    """P(x2, x3) float64 [V, V] after SHORT at temperature .7, top-k 3, x1 summed out; without this package."""

    def next_token(ids):
        top = target.model(input_ids=ids, use_cache=False).logits[:, -1].double().topk(3)
        return torch.zeros(len(ids), V, dtype=torch.float64).scatter(1, top.indices, (top.values / 0.7).softmax(-1))

    def extend(ids, p):
        rows, token = p.nonzero(as_tuple=True)
        return torch.cat([ids[rows], token[:, None]], 1), p[rows, token], rows

    one, p_one, _ = extend(torch.tensor([SHORT]), next_token(torch.tensor([SHORT])))
    two, p_two, parent = extend(one, next_token(one))
    weights = p_one[parent] * p_two
    return torch.zeros(V, V, dtype=torch.float64).index_add_(0, two[:, -1], weights[:, None] * next_token(two))


def test_a_row_at_the_targets_last_position_does_not_stop_its_neighbours():
    target = make_target(max_position_embeddings=20)
    prompts = [tokens(1, 15)[0].tolist(), PROMPT[:4]]
    texts = [plain(target, [prompt], 6)[0] for prompt in prompts]
    done = generate(target, prompts, Oracle(texts, 7), k=7, max_new_tokens=6, stop_ids=())
    assert [g.tokens for g in done.generations] == texts
    alone = [
        generate(target, [prompt], Oracle([text], 7), k=7, max_new_tokens=6, stop_ids=()).generations[0]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert [counted(g) for g in done.generations] == [counted(g) for g in alone]


def test_errors(target):
    for prompts, message in (([], "prompt 0 is empty"), ([[3], []], "prompt 1 is empty")):
        with pytest.raises(GenerateError, match=message):
            generate(target, prompts)
    with pytest.raises(GenerateError, match="k is 0"):
        generate(target, [[3]], NgramProposer(), k=0)
    with pytest.raises(GenerateError, match="max_new_tokens is 0"):
        generate(target, [[3]], max_new_tokens=0)
    with pytest.raises(GenerateError, match="tokenizer"):
        generate(target, [[3]], stop_strings=["x"])
    with pytest.raises(TargetError, match="257 positions are needed"):
        generate(target, [[3] * 250], max_new_tokens=20, stop_ids=())


def test_nan_in_the_target_raises():
    target = make_target()
    target.lm_head_weight.data[3] = torch.nan
    for sampling in (Sampling(), ONE_HOT):
        with pytest.raises(SamplingError, match="NaN"):
            generate(target, [PROMPT], sampling=sampling)


def test_baseline_and_draft_share_forward_cache_attention_and_counter(target, text, monkeypatch):
    """Both run Target.step on a RaggedCache with the model's own attention and dtype, and count every call."""
    calls = []
    step = target.step

    def spy(tokens, cache, *args, **kwargs):
        done = step(tokens, cache, *args, **kwargs)
        calls.append((type(cache).__name__, target.config._attn_implementation, done.logits.dtype))
        return done

    monkeypatch.setattr(target, "step", spy)
    for proposer in (None, Oracle([text], right=2), NgramProposer()):
        calls.clear()
        done = generate(target, [PROMPT], proposer, k=3, max_new_tokens=13, stop_ids=())
        assert set(calls) == {("RaggedCache", "eager", torch.float32)}
        assert len(calls) == 1 + done.rounds == 1 + done.counts.iterations
