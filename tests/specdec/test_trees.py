"""Trees end to end: logits of nodes, rollback, exact multi-candidate verification, greedy identity, counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafts.base import DraftError, Proposal
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree, ancestors
from drafttrain.specdec import verify as verify_module
from drafttrain.specdec.decode import GenerateError, generate
from drafttrain.specdec.policy import Confidence
from drafttrain.specdec.verify import verify, verify_chain
from tests.specdec.test_verify import P, Q, grid
from tests.tiny_drafts import agreeable_draft, make_draft, make_target, plain
from tests.tiny_models import V, tokens

PROMPT = tokens(1, 9)[0].tolist()
RAGGED = [PROMPT, tokens(1, 17)[0].tolist(), PROMPT[:2], tokens(1, 5)[0].tolist()]
WIDE = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]])
PLAIN = Sampling(temperature=1.0)
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic")


@pytest.fixture(scope="module", params=["Llama", "Gemma3", "GptOss"])
def target(request):
    return make_target(request.param)


def random_parents(B, N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [sorted(int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(N)) for _ in range(B)]
    return torch.tensor(rows)


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def test_each_node_sees_its_path_alone_and_the_accepted_path_becomes_the_text(target):
    """Logits of every node equal a plain forward over its path, also past a sliding window; the gathered cache equals a
    prefill of the text."""
    parents, drafted = random_parents(3, 7), tokens(3, 8)
    prompts = [tokens(1, n)[0] for n in (4, 9, 6)]
    cache = RaggedCache(3)
    lengths = torch.tensor([4, 9, 6])
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    target.step(padded, cache, lengths)
    cache.lengths = lengths.clone()
    step = target.step(drafted, cache, parents=parents)
    deepest = []
    for row in range(3):
        paths = [path_to(parents[row].tolist(), node) for node in range(7)]
        for node, path in enumerate(paths):
            text = torch.cat([prompts[row], drafted[row, :1], drafted[row, [i + 1 for i in path]]])
            alone = target.step(text[None], RaggedCache(1)).logits[0, -1]
            torch.testing.assert_close(step.logits[row, node + 1], alone, rtol=1e-4, atol=1e-4)
        deepest.append(max(paths, key=len))
    path = torch.full((3, max(map(len, deepest)) + 1), -1)
    for row, nodes in enumerate(deepest):
        path[row, 0] = 0
        path[row, 1 : len(nodes) + 1] = torch.tensor(nodes) + 1
    cache.gather(path)
    cache.lengths = lengths + torch.tensor([len(nodes) + 1 for nodes in deepest])
    for row, nodes in enumerate(deepest):
        fresh = RaggedCache(1)
        text = torch.cat([prompts[row], drafted[row, :1], drafted[row, [i + 1 for i in nodes]]])
        target.step(text[None], fresh)
        fresh.lengths = torch.tensor([len(text)])
        for layer in range(target.num_layers):
            for mine, theirs in zip(cache.entries(layer, row), fresh.entries(layer, 0), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tree", [WIDE, DynamicTree(3, 9), DynamicTree(1, 4), DynamicTree(8, 60)], ids=str)
@pytest.mark.parametrize("kind", ["random", "agreeable"])
def test_greedy_text_is_plain_greedy_text(target, tree, kind):
    draft = make_draft(target) if kind == "random" else agreeable_draft(target)
    for k in (1, 2, 4):
        done = generate(target, RAGGED, draft.proposer(target, tree), k=k, max_new_tokens=20, stop_ids=())
        assert [g.tokens for g in done.generations] == plain(target, RAGGED, 20)
        counts = done.counts
        assert counts.tree and counts.acceptance_rate is None
        assert len(counts.per_position_acceptance) <= k and sum(counts.lengths) == counts.iterations
        assert counts.mean_acceptance_length == pytest.approx(1 + sum(counts.per_position_acceptance))


def test_a_tree_is_accepted_deeper_than_its_first_branch():
    target = make_target()
    draft = agreeable_draft(target)
    taus = [
        generate(target, RAGGED, draft.proposer(target, tree), k=4, max_new_tokens=40, stop_ids=()).counts
        for tree in (None, DynamicTree(1, 4), DynamicTree(8, 60))
    ]
    chain, line, wide = (counts.mean_acceptance_length for counts in taus)
    assert line == chain and wide > chain


def test_a_dynamic_tree_of_one_branch_is_the_chain():
    target = make_target()
    draft = make_draft(target, ids=torch.arange(0, V, 2))
    seen = []
    for tree in (None, DynamicTree(1, 9), StaticTree.from_paths([[0] * n for n in range(1, 6)])):
        proposer = draft.proposer(target, tree)
        generate(target, RAGGED, proposer, k=5, max_new_tokens=7, stop_ids=(), observe=None)
        proposal = proposer.propose(torch.tensor([5] * len(proposer._hidden)))
        seen.append(proposal.tokens.tolist())
        assert proposal.lengths.tolist() == [5] * len(proposal.lengths)
    assert seen[0] == seen[1] == seen[2]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(0, 100))
def test_a_dynamic_tree_keeps_the_likeliest_nodes(topk, nodes, depth, seed):
    """Against a search by hand: all paths of the beam, best products first."""
    target = make_target()
    draft = make_draft(target, seed=seed)
    proposer = draft.proposer(target, DynamicTree(topk, nodes))
    prompts = [PROMPT, PROMPT[:3]]
    generate(target, prompts, proposer, k=depth, max_new_tokens=2, stop_ids=())
    k = torch.tensor([depth, max(depth - 1, 0)])[: len(proposer._hidden)]
    proposal = proposer.propose(k)
    for row, limit in enumerate(k.tolist()):
        count = int(proposal.lengths[row])
        parents = proposal.parents[row, :count].tolist()
        assert all(-1 <= parent < i for i, parent in enumerate(parents)) and parents == sorted(parents)
        assert max((len(path_to(parents, i)) for i in range(count)), default=0) <= limit
        siblings = list(zip(parents, proposal.tokens[row, :count].tolist(), strict=True))
        assert len(set(siblings)) == count <= nodes
        full = sum(min(topk, V) * (topk if level else 1) for level in range(limit))
        assert count == min(nodes, full)


def multi(p, proposal, uniforms, sampling=PLAIN):
    """verify on B rows whose every node has the target distribution p; -> path, next."""
    B, N = proposal.tokens.shape
    return verify(p.log().expand(B, N + 1, len(p)), proposal, sampling, uniforms)


def first_tokens(path, after, proposal):
    rows = torch.arange(len(after))
    return torch.where(path[:, 0] >= 0, proposal.tokens[rows, path[:, 0].clamp_min(0)], after)


def test_two_deterministic_children_by_hand():
    """p = (.5, .3, .15, .05), children 1 then 0: output p, level acceptance .8."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    u = torch.cartesian_prod(grid(70), grid(70), grid(4))  # The thresholds .3 and .5 / .7 fall on this grid.
    B = len(u)
    proposal = Proposal(torch.tensor([[1, 0]]).expand(B, 2), torch.full((B,), 2), torch.full((B, 2), -1))
    path, after = multi(p, proposal, u)
    assert (path[:, 0] >= 0).double().mean().item() == pytest.approx(0.8, abs=1e-6)
    shares = torch.bincount(first_tokens(path, after, proposal), minlength=4) / B
    torch.testing.assert_close(shares, p, rtol=0, atol=1e-6)


def two_draws(n):
    """Two draws without replacement from Q, enumerated on grids; -> tokens [B, 2], weights [B]."""
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    weights = torch.tensor([Q[a] * Q[b] / (1 - Q[a]) for a, b in pairs], dtype=torch.float64)
    u = torch.cartesian_prod(grid(n), grid(n), grid(n))
    drafted = torch.tensor(pairs).repeat_interleave(len(u), 0)
    return drafted, weights.repeat_interleave(len(u)) / len(u), u.repeat(len(pairs), 1)


def test_two_draws_without_replacement_by_hand():
    """q = (.2, .5, .3), p = (.5, .3, .2): output p, acceptance 283/350."""
    drafted, weights, u = two_draws(15)  # Thresholds .6 and 2/3 fall on this grid: shares are exact.
    B = len(drafted)
    proposal = Proposal(
        drafted, torch.full((B,), 2), torch.full((B, 2), -1), Q.expand(B, 2, 3).contiguous(), torch.arange(3)
    )
    path, after = multi(P, proposal, u, DRAWN)
    assert (weights * (path[:, 0] >= 0)).sum().item() == pytest.approx(283 / 350, abs=1e-6)
    shares = torch.zeros(3, dtype=torch.float64).index_add(0, first_tokens(path, after, proposal), weights)
    torch.testing.assert_close(shares, P.double(), rtol=0, atol=1e-6)


def output_of_two_draws(p, q, n=16):
    """The distribution of the first token out, enumerated over two draws without replacement and their uniforms."""
    pairs = [(a, b) for a in range(len(q)) for b in range(len(q)) if a != b]
    weights = torch.tensor([q[a] * q[b] / (1 - q[a]) for a, b in pairs], dtype=torch.float64)
    u = torch.cartesian_prod(grid(n), grid(n), grid(n))
    drafted, B = torch.tensor(pairs).repeat_interleave(len(u), 0), len(pairs) * len(u)
    proposal = Proposal(drafted, torch.full((B,), 2), torch.full((B, 2), -1), q.expand(B, 2, -1), torch.arange(len(q)))
    path, after = multi(p, proposal, u.repeat(len(pairs), 1), DRAWN)
    shares = torch.zeros(len(p), dtype=torch.float64)
    return shares.index_add(0, first_tokens(path, after, proposal), weights.repeat_interleave(len(u)) / len(u))


parts = st.lists(st.integers(1, 9), min_size=4, max_size=4).map(lambda w: torch.tensor(w) / sum(w))


@settings(max_examples=12, deadline=None)
@given(parts, parts)
def test_two_draws_without_replacement_give_p_whatever_q(p, q):
    torch.testing.assert_close(output_of_two_draws(p, q), p.double(), rtol=0, atol=0.04)


def test_a_second_draw_tested_against_the_whole_q_is_not_the_target(monkeypatch):
    """The fault: q not renormalised after a refusal."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.7, 0.1, 0.1, 0.1])
    torch.testing.assert_close(output_of_two_draws(p, q), p.double(), rtol=0, atol=0.04)
    right = verify_module._without
    monkeypatch.setattr(
        verify_module, "_without", lambda before, left, refused: right(before, left, refused & (before[0, 0] < 0.5))
    )
    assert (output_of_two_draws(p, q) - p).abs().max() > 0.06


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 6), st.booleans())
def test_a_chain_as_a_tree_gives_the_chain_rule(seed, vocabulary, K, drawn):
    generator = torch.Generator().manual_seed(seed)
    B = 16
    logits = torch.randn(B, K + 1, vocabulary, generator=generator) * 2
    q = torch.rand(B, K, vocabulary, generator=generator) ** 2
    q = q / q.sum(-1, keepdim=True)
    drafted = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, K)
    lengths = torch.randint(0, K + 1, (B,), generator=generator)
    uniforms = torch.rand(B, K + 1, generator=generator, dtype=torch.float64)
    parents = torch.arange(-1, K - 1).expand(B, K)
    extra = (q, torch.arange(vocabulary)) if drawn else (None, None)
    for sampling in (DRAWN if drawn else PLAIN, Sampling()):
        path, after = verify(logits, Proposal(drafted, lengths, parents, *extra), sampling, uniforms)
        accepted, expected = verify_chain(logits, Proposal(drafted, lengths, None, *extra), sampling, uniforms)
        assert (path >= 0).sum(1).tolist() == accepted.tolist() and after.tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [PLAIN, DRAWN], ids=["one_hot", "probabilistic"])
@pytest.mark.parametrize("top_k", [0, 5])
def test_sampled_trees_of_a_draft_keep_the_targets_distribution(sampling, top_k):
    """Chi-squared over the first decoded token and the pair behind it; each row is a request of its own."""
    target = make_target()
    draft = agreeable_draft(target)
    sampling = Sampling(0.7, 1.0, top_k, 0, sampling.draft_mode)
    tree = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    n = 3000
    fast = generate(
        target, [PROMPT] * n, draft.proposer(target, tree), k=2, sampling=sampling, max_new_tokens=3, stop_ids=()
    )
    slow = generate(target, [PROMPT] * n, sampling=Sampling(0.7, 1.0, top_k, 77), max_new_tokens=3, stop_ids=())
    assert fast.counts.accepted > 100
    for place in (1, 2):
        ours, theirs = (
            torch.bincount(torch.tensor([g.tokens[place] for g in done.generations]), minlength=V).double()
            for done in (fast, slow)
        )
        assert two_sample_p(ours, theirs) > 1e-4


def two_sample_p(a, b):
    """p value of a chi-squared test that two histograms of equal size come from one distribution."""
    common = (a + b) >= 10
    a = torch.cat([a[common], a[~common].sum()[None]])
    b = torch.cat([b[common], b[~common].sum()[None]])
    used = (a + b) > 0
    statistic = ((a - b)[used] ** 2 / (a + b)[used]).sum()
    return torch.special.gammaincc(torch.tensor((int(used.sum()) - 1) / 2).double(), statistic / 2).item()


def test_rows_of_a_ragged_batch_of_trees_equal_their_batch_1_runs():
    target = make_target("Gemma3")
    draft = agreeable_draft(target)
    for sampling, tree in ((Sampling(), DynamicTree(3, 8)), (Sampling(0.8), DynamicTree(3, 8)), (DRAWN, WIDE)):
        options = {"k": 3, "sampling": sampling, "max_new_tokens": 14, "stop_ids": ()}
        together = generate(target, RAGGED, draft.proposer(target, tree), **options).generations
        for row, prompt in enumerate(RAGGED):
            alone = generate(target, [prompt], draft.proposer(target, tree), requests=[row], **options).generations[0]
            assert together[row].tokens == alone.tokens and together[row].counts == alone.counts


def test_a_dynamic_tree_takes_no_drawn_drafts():
    target = make_target()
    with pytest.raises(DraftError, match="Mend: draft_mode one_hot"):
        generate(target, [PROMPT], make_draft(target).proposer(target, DynamicTree(2, 4)), sampling=DRAWN)


def test_a_tree_wider_than_the_vocabulary_is_refused():
    target = make_target()
    draft = make_draft(target, ids=torch.tensor([4, 9]))
    with pytest.raises(DraftError, match="a narrower tree"):
        draft.proposer(target, StaticTree.from_paths([[0], [1], [2]]))


def test_a_policy_that_watches_takes_no_trees():
    target = make_target()
    proposer = make_draft(target).proposer(target, DynamicTree(2, 4))
    with pytest.raises(GenerateError, match="watches a chain"):
        generate(target, [PROMPT], proposer, policy=Confidence())


def test_draws_beyond_what_top_k_leaves_stay_exact():
    """top-k 1 leaves one token, the tree asks for three children: the same token again, and nothing else comes out."""
    target = make_target()
    draft = agreeable_draft(target)
    sampling = Sampling(1.0, 1.0, 1, 3, "probabilistic")
    done = generate(
        target, RAGGED, draft.proposer(target, WIDE), k=4, sampling=sampling, max_new_tokens=15, stop_ids=()
    )
    assert [g.tokens for g in done.generations] == plain(target, RAGGED, 15)


def test_positions_run_out_by_depth_not_by_nodes():
    target = make_target(max_position_embeddings=24)
    draft = agreeable_draft(target)
    room = 24 - len(PROMPT)
    done = generate(target, [PROMPT], draft.proposer(target, WIDE), k=4, max_new_tokens=room, stop_ids=())
    assert done.generations[0].tokens == plain(target, [PROMPT], room)[0]


@pytest.mark.parametrize("tree", [WIDE, DynamicTree(3, 9)], ids=str)
@pytest.mark.parametrize("capture", [False, True])
def test_a_row_at_the_last_position_beside_one_with_room(tree, capture):
    """The long row may draft less deep than the batch's tree: what is padding for it needs no positions."""
    target = make_target(max_position_embeddings=24)
    draft = agreeable_draft(target)
    prompts = [tokens(1, 18)[0].tolist(), PROMPT[:4]]
    options = {"max_new_tokens": 6, "stop_ids": ()}
    done = generate(target, prompts, draft.proposer(target, tree), k=4, capture=capture, **options)
    assert [g.tokens for g in done.generations] == plain(target, prompts, 6)


def test_ancestors_of_ragged_rows_hide_other_rows_padding():
    parents = torch.tensor([[-1, 0, 0], [-1, -1, 1]])
    assert ancestors(parents).shape == (2, 4, 4) and not ancestors(parents)[0, 2, 3]
