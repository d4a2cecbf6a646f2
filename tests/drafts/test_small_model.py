"""A small model as the draft: its proposals are its own plain text, whatever was accepted, in batches and at its
limits; and models made of chosen layers or head rows.
"""

import pytest
import torch

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.small_model import SmallModelProposer, prune_layers, with_head_rows
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.decode import generate
from drafttrain.specdec.policy import Policy
from tests.tiny_drafts import make_target, plain
from tests.tiny_models import V, tokens

PROMPT = tokens(1, 6)[0].tolist()
RAGGED = [PROMPT, tokens(1, 11)[0].tolist(), PROMPT[:2]]
IDS = torch.arange(1, V, 3)
FAMILIES = ["Llama", "Gemma3", "GptOss"]
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic", seed=5)
NUCLEUS = Sampling(temperature=0.7, top_p=0.8, top_k=20, draft_mode="probabilistic", seed=2)
ONE_HOT = Sampling(temperature=1.0, seed=5)


class Watched(SmallModelProposer):
    """Notes, for each round: the committed text of row 0, the k asked for, the proposal, and the forwards it took."""

    def begin(self, step, next_token, sampling, streams):
        self.text, self.rounds = [*step.tokens[0, : int(step.lengths[0])].tolist(), int(next_token[0])], []
        super().begin(step, next_token, sampling, streams)

    def propose(self, k, stop=None):
        forwards = []
        handle = self.model.decoder.register_forward_hook(lambda *_: forwards.append(1))
        proposal = super().propose(k, stop)
        handle.remove()
        self.rounds.append((list(self.text), int(k[0]), proposal, len(forwards)))
        return proposal

    def advance(self, step, path, next_token):
        super().advance(step, path, next_token)
        self.text += [*step.tokens[0, 1 : 1 + int((path[0] >= 0).sum())].tolist(), int(next_token[0])]


class Alternating(Policy):
    """Drafts nothing in most rounds."""

    def __init__(self):
        self.ks = [0, 3, 0, 0, 2, 4]

    def limit(self, k):
        self.ks.append(self.ks.pop(0))
        return k.clamp_max(self.ks[-1])


class Unsure(Policy):
    """Stops each row where the draft's likeliest token is not among the first half of the vocabulary."""

    watches = True

    def stop(self, logits):
        return logits.argmax(-1) >= V // 2


@pytest.fixture(scope="module")
def target():
    return make_target("Gemma3")


@pytest.fixture(scope="module")
def half(target):
    """A draft that agrees now and then: half of the target's layers."""
    return prune_layers(target, [0, 1, 2, 3, 5, 7])


def run(target, proposer, prompts=(PROMPT,), k=3, count=24, sampling=GREEDY, **options):
    return generate(target, prompts, proposer, k=k, sampling=sampling, max_new_tokens=count, stop_ids=(), **options)


@pytest.mark.parametrize(("family", "k"), [("Llama", 1), ("Gemma3", 5), ("GptOss", 2)])
def test_proposals_are_the_small_models_own_text(family, k):
    """Rounds that accept none, some and all of the drafts, against plain decoding of the small model alone."""
    big = make_target(family)
    small = prune_layers(big, [0, 1, 2, 3, 4, 5, 7])
    watched = Watched(small)
    done = run(big, watched, k=k, count=30)
    assert [g.tokens for g in done.generations] == plain(big, [PROMPT], 30)
    for text, asked, proposal, _ in watched.rounds:
        assert proposal.tokens.tolist() == plain(small, [text], asked) and proposal.lengths.tolist() == [asked] == [k]
    assert 0 < done.counts.accepted < done.counts.drafted


def test_a_round_of_k_takes_k_forwards(target, half):
    """The commit is merged with the first draft; the very first draft comes with the prompt. Rounds of nothing are
    free."""
    for small, policy, expected in (
        (half, None, [2, 3, 3, 3]),
        (target, None, [2, 3, 3, 3]),
        (half, Alternating(), [0, 3, 0, 0, 2, 4]),
    ):
        watched = Watched(small)
        run(target, watched, k=4 if policy else 3, count=30, policy=policy)
        assert [forwards for *_, forwards in watched.rounds][: len(expected)] == expected


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, NUCLEUS], ids=["greedy", "drawn", "nucleus"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_as_its_own_draft_is_always_right(family, sampling):
    """Every draft accepted (q is p): 25 tokens, one from the prefill, take 24 / 4 forwards."""
    target = make_target(family)
    done = run(target, SmallModelProposer(target), k=3, count=25, sampling=sampling)
    counts = done.counts
    assert (counts.iterations, counts.drafted, counts.accepted, counts.emitted) == (6, 18, 18, 25)


@pytest.mark.parametrize(
    ("sampling", "ids", "policy"),
    [
        (GREEDY, None, None),
        (GREEDY, IDS, Unsure()),
        (DRAWN, None, Unsure()),
        (NUCLEUS, IDS, None),
        (ONE_HOT, None, None),
    ],
    ids=["greedy", "greedy-ids-stopping", "drawn-stopping", "nucleus-ids", "one-hot"],
)
def test_rows_of_a_ragged_batch_equal_their_own_runs(target, half, sampling, ids, policy):
    many = run(target, SmallModelProposer(half, ids), RAGGED, sampling=sampling, policy=policy).generations
    for request, prompt in enumerate(RAGGED):
        alone = run(
            target, SmallModelProposer(half, ids), [prompt], sampling=sampling, policy=policy, requests=[request]
        ).generations[0]
        assert (alone.tokens, alone.counts) == (many[request].tokens, many[request].counts)
    if sampling is GREEDY:
        assert [g.tokens for g in many] == plain(target, RAGGED, 24)
    assert sum(g.counts.accepted for g in many) > 0


def test_rows_that_end_early_leave(target, half):
    """One row stops first; the others must go on with their own caches."""
    texts = plain(target, RAGGED, 24)
    stop = next(token for token in texts[1][2:] if token not in texts[0] + texts[2] + texts[1][:2])
    done = generate(target, RAGGED, SmallModelProposer(half), k=3, max_new_tokens=24, stop_ids=[stop]).generations
    assert [len(g.tokens) for g in done] == [24, texts[1].index(stop) + 1, 24]
    assert [g.tokens for g in done] == [texts[0], texts[1][: len(done[1].tokens)], texts[2]]


@pytest.mark.parametrize("policy", [Policy, Alternating, Unsure])
def test_the_cache_equals_a_fresh_prefill_of_the_text(target, half, policy):
    """What is committed after rounds that accept none, some and all; nothing of the refused drafts is left."""
    watched = Watched(half)
    run(target, watched, RAGGED, k=4, policy=policy(), hold=True)
    length = int(watched._cache.lengths[0])
    fresh = RaggedCache(1)
    half.step(torch.tensor([watched.text[:length]]), fresh)
    fresh.lengths = torch.tensor([length])
    assert length + len(watched._pending[0]) == len(watched.text) and length > 20
    for layer in range(half.num_layers):
        for kept, new in zip(watched._cache.entries(layer, 0), fresh.entries(layer, 0), strict=True):
            torch.testing.assert_close(kept, new, rtol=1e-4, atol=1e-4)


def test_a_policy_stops_rows_before_the_draw(target, half):
    watched = Watched(half)
    done = run(target, watched, k=4, policy=Unsure())
    assert done.generations[0].tokens == plain(target, [PROMPT], 24)[0]
    lengths = []
    for text, asked, proposal, _ in watched.rounds:
        free = plain(half, [text], asked)[0]
        sure = [token < V // 2 for token in free]
        lengths.append(sure.index(False) if False in sure else asked)
        assert (
            proposal.lengths.tolist() == lengths[-1:]
            and proposal.tokens[0, : lengths[-1]].tolist() == free[: lengths[-1]]
        )
    assert len(set(lengths)) > 2


@pytest.mark.parametrize("family", ["Llama", "Granite"])
def test_a_draft_vocabulary_leaves_out_the_other_tokens(family):
    """The first draft is the likeliest of IDS by the small model's full logits (Granite: with its divisor)."""
    target = make_target(family)
    small = prune_layers(target, [0, 1, 2, 3, 4, 5, 7])
    watched = Watched(small, IDS)
    done = run(target, watched, k=2)
    assert done.generations[0].tokens == plain(target, [PROMPT], 24)[0]
    for text, _, proposal, _ in watched.rounds:
        logits = small.step(torch.tensor([text]), RaggedCache(1), last_only=True).logits[0, 0]
        assert int(proposal.tokens[0, 0]) == int(IDS[logits[IDS].argmax()])
        assert set(proposal.tokens.flatten().tolist()) <= set(IDS.tolist())
    full = small.step(torch.tensor([PROMPT]), RaggedCache(1)).logits
    torch.testing.assert_close(
        with_head_rows(small, IDS).step(torch.tensor([PROMPT]), RaggedCache(1)).logits, full[..., IDS]
    )


def test_q_is_the_warped_distribution_on_its_ids(target, half):
    watched = Watched(half, IDS)
    run(target, watched, k=2, sampling=DRAWN)
    for text, _, proposal, _ in watched.rounds:
        logits = half.step(torch.tensor([text]), RaggedCache(1), last_only=True).logits[0, 0]
        torch.testing.assert_close(proposal.q[0, 0], logits[IDS].softmax(-1), rtol=1e-4, atol=1e-5)
        assert proposal.q_ids.tolist() == IDS.tolist()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("positions", [8, 9, 10, 11, 20])
def test_a_row_that_outgrows_the_small_model_is_drafted_no_further(positions, sampling):
    """Positions that end in the prompt (RAGGED: 6, 11 and 2 tokens), at its end, and in the text."""
    target, small = make_target("Llama"), make_target("Llama", max_position_embeddings=positions)
    proposer = Watched(small)
    batch = run(target, proposer, RAGGED, k=3, sampling=sampling).generations
    for request, prompt in enumerate(RAGGED):
        alone = run(target, SmallModelProposer(small), [prompt], sampling=sampling, requests=[request]).generations[0]
        assert (alone.tokens, alone.counts) == (batch[request].tokens, batch[request].counts)
        # The same weights, so all drafts stand; the last one is predicted from the small model's last position.
        drafted, known = 0, len(prompt) + 1
        while known <= positions:
            drafted += min(3, positions - known + 1)
            known += min(3, positions - known + 1) + 1
        assert alone.counts.drafted == alone.counts.accepted == drafted
    if sampling is GREEDY:
        assert [g.tokens for g in batch] == plain(target, RAGGED, 24)


def test_another_vocabulary_is_refused(target):
    with pytest.raises(DraftError, match="vocabulary of 64, the target one of 99.*Mend"):
        run(target, SmallModelProposer(make_target("Llama", vocab_size=64)))


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 4], [-1, 2], [2, V]])
def test_a_draft_vocabulary_that_is_none_is_refused(half, ids):
    with pytest.raises(DraftError, match="strictly rising, within 0..98"):
        SmallModelProposer(half, torch.tensor(ids, dtype=torch.long))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "Gemma3", "GptOss"])
@pytest.mark.parametrize("kept", [range(8), [0], [1, 3, 4, 7]], ids=["all", "one", "some"])
def test_pruned_layers_are_skipped_and_nothing_else_changes(family, kept):
    """Against the whole model whose other layers are made to return their input."""
    target = make_target(family)
    before = target.step(tokens(), RaggedCache(2)).logits
    small = prune_layers(target, kept)
    assert small.num_layers == small.config.num_hidden_layers == len(kept) and target.num_layers == 8
    assert {p.data_ptr() for p in small.model.parameters()} <= {p.data_ptr() for p in target.model.parameters()}
    torch.testing.assert_close(target.step(tokens(), RaggedCache(2)).logits, before, rtol=0, atol=0)
    skip = [
        layer.register_forward_hook(lambda module, args, output: args[0])
        for i, layer in enumerate(target.layers)
        if i not in kept
    ]
    expected = target.step(tokens(), RaggedCache(2)).logits
    for handle in skip:
        handle.remove()
    torch.testing.assert_close(small.step(tokens(), RaggedCache(2)).logits, expected)
    torch.testing.assert_close(small.model(input_ids=tokens()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept", [[], [2, 1], [1, 1], [-1, 2], [3, 8]])
def test_layers_that_do_not_exist_are_refused(target, kept):
    with pytest.raises(DraftError, match="rising distinct numbers within 0..7"):
        prune_layers(target, kept)
