"""Medusa heads in the decoding loop: what training counts is what is accepted, chains and trees are lossless."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.drafts.base import supervised_rows
from drafttrain.drafts.medusa_proposer import MedusaProposer
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.objective import Objective
from drafttrain.nn.sampling import Sampling, Streams, warp
from drafttrain.nn.tree import StaticTree
from drafttrain.specdec.decode import generate
from tests.specdec.test_trees import DRAWN, PROMPT, RAGGED, two_sample_p
from tests.tiny_drafts import make_batch, make_target, plain, train
from tests.tiny_medusa import fresh_heads, make_heads
from tests.tiny_models import V

HEADS = 4
TREE = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]])
EVERY_THIRD = torch.arange(0, V, 3)
CASES = [("Llama", {}), ("Gemma3", {"own_heads": True}), ("Qwen3", {"sequential": True, "num_hidden_layers": 2})]


def trained_on_answers(family, bias=0.0, **kind):
    """A target, prompts, the target's greedy answers, and heads that were trained on some of them; bias: how large the
    biases are to begin with."""
    target = make_target(family)
    prompts = torch.randint(3, V, (5, 8), generator=torch.Generator().manual_seed(2)).tolist()
    texts = torch.tensor([p + c for p, c in zip(prompts, plain(target, prompts, 60), strict=True)])
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :8] = False
    draft = fresh_heads(target, heads=HEADS, **kind)
    draft.objective = Objective.of("cross_entropy")
    torch.manual_seed(0)
    for block in draft.blocks:
        torch.nn.init.normal_(block.layers[0].bias, std=bias)
    batch = make_batch(target, texts[:4, :40], mask[:4, :40])
    draft.calibrate(batch)
    losses = train(draft, batch, 60)
    assert losses[-1] < 0.6 * losses[0]
    return target, prompts, texts, draft


@pytest.fixture(scope="module", params=CASES, ids=["shared", "own", "sequential"])
def trained(request):
    family, kind = request.param
    return trained_on_answers(family, **kind)


def training_states(draft, batch):
    """What each head's vocabulary matrix read in the training forward, K of [B, T, H]."""
    seen, state = [], draft.state
    draft.state = lambda *arguments: seen.append(state(*arguments)) or seen[-1]
    draft(batch)
    del draft.state
    return seen


def ranked_words(draft, target, texts):
    """The heads' words on known texts, teacher-forced: int64 [K, B, T, Vd], likeliest first."""
    batch = make_batch(target, texts, torch.ones_like(texts, dtype=torch.bool))
    with torch.no_grad():
        logits = torch.stack([draft.logits(i, state) for i, state in enumerate(training_states(draft, batch))])
    return draft.draft_ids[logits.sort(dim=-1, descending=True, stable=True).indices]


def replay(words, texts, prompt_length, count, tree):
    """What the loop must count on known greedy texts: [depth accepted in each round] of each row.

    A round stands at x[L] and reads the target at L - 1; the next token at depth d is found if the tree has a child of
    that rank among head d's words. It jumps by what was accepted and one. The prefill gives the first token."""
    nodes = {tuple(path) for path in tree.paths()}
    rounds = []
    for row, text in enumerate(texts):
        at, mine = prompt_length, []
        while at + 1 < prompt_length + count:
            path = ()
            while len(path) < tree.depth and at + 1 + len(path) < len(text):
                found = words[len(path), row, at - 1] == text[at + 1 + len(path)]
                step = (*path, int(found.nonzero()[0, 0]))
                if step not in nodes:
                    break
                path = step
            mine.append(len(path))
            at += mine[-1] + 1
        rounds.append(mine)
    return rounds


def compare(done, rounds, K, nodes):
    for mine, generation in zip(rounds, done.generations, strict=True):
        counts = generation.counts
        assert (counts.iterations, counts.drafted, counts.accepted) == (len(mine), nodes * len(mine), sum(mine))
        assert counts.reached == [sum(accepted > i for accepted in mine) for i in range(K)]


@pytest.mark.parametrize("K", range(1, HEADS + 1))
def test_teacher_forced_replay_gives_the_loops_counts_of_chains(trained, K):
    target, prompts, texts, draft = trained
    done = generate(target, prompts, draft.proposer(target), k=K, max_new_tokens=50, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, 8:58].tolist()
    chain = StaticTree.from_paths([[0] * n for n in range(1, K + 1)])
    compare(done, replay(ranked_words(draft, target, texts), texts, 8, 50, chain), K, K)
    assert 0.1 < done.counts.per_position_acceptance[0] < 0.99
    assert done.counts.per_position_acceptance[-1] > 0


@pytest.mark.parametrize("K", [1, 2, HEADS])
def test_teacher_forced_replay_gives_the_loops_counts_of_a_tree(trained, K):
    target, prompts, texts, draft = trained
    done = generate(target, prompts, draft.proposer(target, TREE), k=K, max_new_tokens=50, stop_ids=())
    assert [g.tokens for g in done.generations] == texts[:, 8:58].tolist()
    cut = StaticTree.from_paths([path for path in TREE.paths() if len(path) <= K])
    words = ranked_words(draft, target, texts)
    compare(done, replay(words, texts, 8, 50, cut), K, cut.nodes)
    line = StaticTree.from_paths([[0] * n for n in range(1, K + 1)])
    assert done.counts.accepted > sum(map(sum, replay(words, texts, 8, 50, line)))


def test_unconditional_accuracy_is_what_training_counts(trained):
    """step_acceptance/k: head k's hits over all rows that count, whatever the heads before it said."""
    target, _, texts, draft = trained
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :8] = False
    figures = draft(make_batch(target, texts, mask)).figures
    words = ranked_words(draft, target, texts)[..., 0]
    valid = supervised_rows(mask, HEADS)
    chosen = target.model(input_ids=texts).logits.argmax(-1)
    joint = torch.ones_like(mask)
    for k in range(HEADS):
        hit = words[k] == F.pad(chosen[:, 1 + k :], (0, 1 + k), value=-1)
        joint &= hit & valid[k]
        assert figures.rows[k] == valid[k].sum()
        assert figures.hits[k] == (hit & valid[k]).sum()
        assert figures.joint[k] == joint.sum()
    assert figures.joint[-1] < figures.hits[-1]


# Faults: each gives other counts than the replay.


def swapped_biases(draft, proposer):
    biases = [block.layers[0].bias for block in draft.blocks]
    for block, bias in zip(draft.blocks, biases[1:] + biases[:1], strict=True):
        block.layers[0].bias = bias


def no_biases(draft, proposer):
    for block in draft.blocks:
        block.layers[0].bias = torch.nn.Parameter(torch.zeros_like(block.layers[0].bias))


def the_place_before(draft, proposer):
    read = proposer._read
    proposer._read = lambda step, columns, token: read(step, (columns - 1).clamp_min(0), token)


@pytest.mark.parametrize("fault", [swapped_biases, no_biases, the_place_before])
def test_replay_catches_what_serves_at_another_acceptance(fault):
    """The text stays the target's own: only the counts tell."""
    target, prompts, texts, draft = trained_on_answers("Gemma3", bias=2.0)
    chain = StaticTree.from_paths([[0], [0, 0], [0, 0, 0]])
    rounds = replay(ranked_words(draft, target, texts), texts, 8, 50, chain)
    proposer = draft.proposer(target)
    options = {"k": 3, "max_new_tokens": 50, "stop_ids": ()}
    compare(generate(target, prompts, proposer, **options), rounds, 3, 3)
    fault(draft, proposer)
    done = generate(target, prompts, proposer, **options)
    assert [g.tokens for g in done.generations] == texts[:, 8:58].tolist()
    assert done.counts.accepted < 0.9 * sum(map(sum, rounds))


def parity_error(target, draft, sampling=Sampling(), tree=None) -> float:  # noqa: B008
    """Largest difference, as a share of the largest logit, between the logits of proposals (a ragged batch, rounds with
    arbitrary acceptance) and those of training on the same tokens."""
    generator = torch.Generator().manual_seed(7)
    prompts, lengths = torch.randint(3, V, (3, 9), generator=generator), torch.tensor([5, 9, 2])
    last = torch.tensor([4, 17, 60])
    proposer, cache, rows = draft.proposer(target), RaggedCache(3), torch.arange(3)
    step = target.step(prompts, cache, lengths, ())
    cache.lengths = lengths.clone()
    proposer.begin(step, last, sampling, Streams(0, [0, 1, 2]))
    texts = [torch.cat([prompts[row, : lengths[row]], last[row, None]]) for row in rows]
    worst, K = 0.0, draft.max_k
    for accepted in ([2, 0, K], [0, K, 1], [K, 1, 0], [0, 0, 0]):
        served, logits = [], draft.logits
        draft.logits = lambda i, state, served=served, logits=logits: served.append(logits(i, state)) or served[-1]
        proposal = proposer.propose(torch.full((3,), K))
        del draft.logits
        assert len(served) == K
        for row in rows:
            ids = torch.cat([texts[row], proposal.tokens[row]])[None]
            states = training_states(draft, make_batch(target, ids, torch.ones_like(ids, dtype=torch.bool)))
            place = len(texts[row]) - 2
            own = torch.stack([draft.logits(i, state[0, place]) for i, state in enumerate(states)])
            mine = torch.stack([one[row] for one in served])
            worst = max(worst, ((own - mine).abs().max() / mine.abs().max()).item())
            if sampling.draws_drafts:
                torch.testing.assert_close(proposal.q[row], warp(own, sampling), rtol=1e-3, atol=1e-5)
        step = target.step(torch.cat([last[:, None], proposal.tokens], 1), cache, None, ())
        last = torch.randint(3, V, (3,), generator=generator)
        count = torch.tensor(accepted)
        path = torch.arange(K).expand(3, -1)
        proposer.advance(step, path.masked_fill(path >= count[:, None], -1), last)
        cache.lengths = cache.lengths + count + 1
        texts = [torch.cat([texts[row], proposal.tokens[row, : count[row]], last[row, None]]) for row in rows]
    return worst


KINDS = {"shared": {}, "own": {"own_heads": True}, "sequential": {"sequential": True, "num_hidden_layers": 2}}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere2"])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_reproduce_the_training_time_logits(family, kind):
    target = make_target(family)
    draft = make_heads(target, heads=HEADS, **KINDS[kind])
    with torch.no_grad():
        assert parity_error(target, draft) < 3e-4
    if kind != "own":
        sampling = Sampling(temperature=0.7, top_k=20, top_p=0.95, draft_mode="probabilistic")
        with torch.no_grad():
            assert parity_error(target, make_heads(target, EVERY_THIRD, HEADS, **KINDS[kind]), sampling) < 3e-4


def test_parity_catches_a_wrong_place_and_a_wrong_token(monkeypatch):
    target = make_target()
    right = MedusaProposer._read
    with torch.no_grad():
        draft = make_heads(target, heads=HEADS, sequential=True)
        monkeypatch.setattr(MedusaProposer, "_read", lambda self, s, c, t: right(self, s, (c - 1).clamp_min(0), t))
        assert parity_error(target, draft) > 0.01
        monkeypatch.setattr(MedusaProposer, "_read", lambda self, s, c, t: right(self, s, c, (t + 1) % V))
        assert parity_error(target, draft) > 0.01


# Lossless, batched or alone, greedy or sampled.


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
@pytest.mark.parametrize("kind", [*KINDS, "reduced"])
def test_greedy_text_is_plain_greedy_text(family, kind):
    target = make_target(family)
    expected = plain(target, RAGGED, 16)
    make = make_heads if kind == "shared" else fresh_heads  # Random ones, and ones that are right now and then.
    draft = make(target, heads=HEADS, **KINDS.get(kind, {"ids": EVERY_THIRD}))
    for tree, k in ((None, HEADS), (TREE, 2), (TREE, HEADS)):
        done = generate(target, RAGGED, draft.proposer(target, tree), k=k, max_new_tokens=16, stop_ids=())
        assert [g.tokens for g in done.generations] == expected
        assert done.counts.tree == (tree is not None)


@pytest.mark.parametrize("sequential", [False, True])
def test_rows_of_a_ragged_batch_equal_their_batch_1_runs(sequential):
    target = make_target("Gemma3")
    draft = fresh_heads(target, heads=HEADS, sequential=sequential)
    train(draft, make_batch(target, torch.tensor([PROMPT]), torch.ones(1, 9, dtype=torch.bool)), 10)
    for tree in (None, TREE):
        for sampling in (Sampling(), DRAWN):
            options = {"k": 3, "sampling": sampling, "max_new_tokens": 10, "stop_ids": ()}
            together = generate(target, RAGGED, draft.proposer(target, tree), **options).generations
            for row, prompt in enumerate(RAGGED):
                alone = generate(target, [prompt], draft.proposer(target, tree), requests=[row], **options)
                assert together[row].tokens == alone.generations[0].tokens
                assert together[row].counts == alone.generations[0].counts


@pytest.mark.parametrize(
    ("kind", "tree", "mode"),
    [
        ({}, None, "probabilistic"),
        ({}, TREE, "probabilistic"),
        ({}, TREE, "one_hot"),
        ({"sequential": True, "ids": EVERY_THIRD}, None, "probabilistic"),
        ({"sequential": True, "ids": EVERY_THIRD}, TREE, "probabilistic"),
    ],
    ids=["chain", "tree", "tree-one_hot", "sequential-chain", "sequential-tree"],
)
def test_sampled_text_keeps_the_targets_distribution(kind, tree, mode):
    """Chi-squared over the tokens behind the prefill's; each row is a request of its own."""
    target = make_target()
    draft = make_heads(target, heads=2, **kind)
    with torch.no_grad():  # Near the target's own head, which is right now and then.
        for parameter in draft.blocks.parameters():
            parameter.mul_(0.2)
    if tree is not None:
        tree = StaticTree.from_paths([path for path in tree.paths() if len(path) <= 2])
    n, sampling = 2000, Sampling(0.7, 1.0, 5, 0, mode)
    options = {"max_new_tokens": 3, "stop_ids": ()}
    fast = generate(target, [PROMPT] * n, draft.proposer(target, tree), k=2, sampling=sampling, **options)
    slow = generate(target, [PROMPT] * n, sampling=Sampling(0.7, 1.0, 5, 77), **options)
    assert fast.counts.accepted > 100
    for place in (1, 2):
        ours, theirs = (
            torch.bincount(torch.tensor([g.tokens[place] for g in done.generations]), minlength=V).double()
            for done in (fast, slow)
        )
        assert two_sample_p(ours, theirs) > 1e-4


def begun(draft, target, prompts, tree):
    proposer = draft.proposer(target, tree)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    step = target.step(padded, RaggedCache(len(prompts)), lengths, ())
    proposer.begin(step, torch.arange(5, 5 + len(prompts)), Sampling(), Streams(0, range(len(prompts))))
    return proposer


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sequential", [False, True])
def test_rows_are_kept_in_their_order(tree, sequential):
    target = make_target()
    draft = make_heads(target, heads=HEADS, sequential=sequential)
    all_rows = begun(draft, target, RAGGED, tree).propose(torch.full((4,), HEADS)).tokens
    assert len({tuple(row) for row in all_rows.tolist()}) == 4
    proposer = begun(draft, target, RAGGED, tree)
    proposer.keep([2, 0])
    kept = proposer.propose(torch.full((2,), HEADS)).tokens
    assert torch.equal(kept, all_rows[[2, 0]])


def test_plain_heads_give_all_nodes_of_a_depth_the_same_children_and_sequential_ones_do_not():
    target = make_target()
    tree = StaticTree.from_paths([[0], [1], [0, 0], [1, 0]])
    for sequential, same in ((False, True), (True, False)):
        draft = make_heads(target, heads=2, sequential=sequential)
        proposal = begun(draft, target, RAGGED, tree).propose(torch.tensor([2, 2, 2, 2]))
        assert torch.equal(proposal.tokens[:, 2], proposal.tokens[:, 3]) == same
        # The first branch is the chain.
        chain = begun(draft, target, RAGGED, None).propose(torch.tensor([2, 2, 2, 2]))
        assert torch.equal(proposal.tokens[:, [0, 2]], chain.tokens)
