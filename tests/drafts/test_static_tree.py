"""Trees of a fixed shape, drafted from known logits: children by rank, draws without replacement, and their bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafts.base import DraftError, Proposal
from drafttrain.drafts.static_tree import check_width, draft_static_tree, draw_children
from drafttrain.nn.sampling import Sampling, Streams, warp
from drafttrain.nn.tree import StaticTree
from drafttrain.specdec.verify import verify
from tests.specdec.test_verify import Q, grid

PLAIN = Sampling(temperature=1.0)
DRAWN = Sampling(temperature=1.0, draft_mode="probabilistic")
TREE = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
IDS = torch.tensor([3, 5, 8, 13])


class Model:
    """A draft that reads the last token alone: after word w (-1: the root) the logits are row w + 1 of `table`. It
    keeps what it was asked."""

    def __init__(self, words=4, seed=0):
        self.table = torch.randn(words + 1, words, generator=torch.Generator().manual_seed(seed)) * 2
        self.asked = []

    def __call__(self, level, parents, tokens):
        self.asked.append((level, list(parents), tokens.clone()))
        last = torch.full((len(tokens), len(parents)), -1)
        for place, parent in enumerate(parents):
            if parent >= 0:
                last[:, place] = (tokens[:, parent, None] == IDS).long().argmax(-1)
        return self.table[last + 1]


def likeliest(model, last, rank):
    return int(model.table[last + 1].argsort(descending=True)[rank])


def test_greedy_children_are_the_likeliest_words_by_rank():
    model = Model()
    proposal = draft_static_tree(TREE, torch.tensor([3, 3]), model, IDS, Sampling(), Streams(0, [0, 1]))
    words = []
    for parent, rank in zip(TREE.parents, TREE.ranks, strict=True):
        words.append(likeliest(model, words[parent] if parent >= 0 else -1, rank))
    assert proposal.tokens.tolist() == [IDS[words].tolist()] * 2
    assert proposal.parents.tolist() == [[-1, -1, 0, 0, 1, 3]] * 2
    assert proposal.lengths.tolist() == [6, 6]
    assert proposal.q is None
    # Asked once a level, for its parents, with the tokens of earlier levels in place.
    assert [(level, parents) for level, parents, _ in model.asked] == [(0, [-1]), (1, [0, 1]), (2, [3])]
    for (_, _, tokens), count in zip(model.asked, (0, 2, 5), strict=True):
        assert torch.equal(tokens[:, :count], proposal.tokens[:, :count])


def test_rows_go_as_deep_as_they_are_asked():
    model = Model()
    for k, lengths, levels in (
        ([3, 1, 0, 2], [6, 2, 0, 5], 3),
        ([9, 0, 0, 0], [6, 0, 0, 0], 3),
        ([1, 1, 0, 0], [2, 2, 0, 0], 1),
    ):
        model.asked.clear()
        proposal = draft_static_tree(TREE, torch.tensor(k), model, IDS, Sampling(), Streams(0, range(4)))
        assert proposal.lengths.tolist() == lengths
        assert proposal.tokens.shape == proposal.parents.shape == (4, max(lengths))
        assert len(model.asked) == levels
    model.asked.clear()
    nothing = draft_static_tree(TREE, torch.zeros(2, dtype=torch.long), model, IDS, DRAWN, Streams(0, [0, 1]))
    assert nothing.tokens.shape == (2, 0)
    assert nothing.lengths.tolist() == [0, 0]
    assert not model.asked


def test_a_row_draws_the_same_alone_and_beside_shallower_ones():
    model, streams = Model(), lambda rows: Streams(4, rows)
    k = torch.tensor([3, 1, 2])
    together = draft_static_tree(TREE, k, model, IDS, DRAWN, streams([0, 1, 2]))
    for row in range(3):
        alone = draft_static_tree(TREE, k[row : row + 1], model, IDS, DRAWN, streams([row]))
        count = int(alone.lengths[0])
        assert together.lengths[row] == count == TREE.count(int(k[row]))
        assert torch.equal(together.tokens[row, :count], alone.tokens[0])
        torch.testing.assert_close(together.q[row, :count], alone.q[0])


def test_drawn_children_are_distinct_and_their_q_is_the_first_ones():
    model = Model()
    proposal = draft_static_tree(TREE, torch.full((500,), 3), model, IDS, DRAWN, Streams(0, range(500)))
    assert torch.equal(proposal.q_ids, IDS)
    words = (proposal.tokens[..., None] == IDS).long().argmax(-1)
    for node, parent in enumerate(TREE.parents):
        last = words[:, parent] if parent >= 0 else torch.full((500,), -1)
        torch.testing.assert_close(proposal.q[:, node], warp(model.table[last + 1], DRAWN))
    assert (words[:, 0] != words[:, 1]).all()
    assert (words[:, 2] != words[:, 3]).all()
    # The second child of the root: sum over the first of q_a q_b / (1 - q_a).
    q = model.table[0].softmax(-1)
    expected = torch.tensor([sum(float(q[a] * q[b] / (1 - q[a])) for a in range(4) if a != b) for b in range(4)])
    shares = torch.bincount(words[:, 1], minlength=4) / 500
    assert (shares - expected).abs().max() < 4 * math.sqrt(0.25 / 500)


def test_two_draws_without_replacement_by_hand():
    """Q = (.2, .5, .3): a then b with probability q_a q_b / (1 - q_a), on a grid that holds the thresholds."""
    u = torch.cartesian_prod(grid(70), grid(840))
    drawn, q = draw_children(Q.log().expand(len(u), 3), u, PLAIN)
    torch.testing.assert_close(q, Q.expand(len(u), 3))
    shares = torch.zeros(3, 3).index_put((drawn[:, 0], drawn[:, 1]), torch.tensor(1 / len(u)), accumulate=True)
    for a in range(3):
        for b in range(3):
            expected = 0.0 if a == b else float(Q[a] * Q[b] / (1 - Q[a]))
            assert shares[a, b].item() == pytest.approx(expected, abs=2e-3)


def test_a_q_that_runs_out_repeats_its_last_word():
    drawn, _ = draw_children(
        torch.tensor([[0.0, 9.0, 8.0]]), torch.tensor([[0.1, 0.5, 0.9]]).double(), Sampling(1.0, 1.0, 2)
    )
    assert drawn.tolist() == [[1, 2, 2]]


def output(p, q, n=200_000):
    """The distribution of the first token out of two drawn children of one q, counted over many."""
    u = torch.rand(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafted, first = draw_children(q.log().expand(len(u), len(q)), u[:, :2], PLAIN)
    B, ids = len(u), torch.arange(len(q))
    proposal = Proposal(drafted, torch.full((B,), 2), torch.full((B, 2), -1), first[:, None].expand(-1, 2, -1), ids)
    path, after = verify(p.log().expand(B, 3, len(p)), proposal, DRAWN, u[:, 2:])
    token = torch.where(path[:, 0] >= 0, drafted[torch.arange(B), path[:, 0].clamp_min(0)], after)
    return torch.bincount(token, minlength=len(p)) / B


parts = st.lists(st.integers(1, 9), min_size=3, max_size=3).map(lambda w: torch.tensor(w) / sum(w))


@settings(max_examples=8, deadline=None)
@given(parts, parts)
def test_drawn_children_verified_give_the_target_whatever_q(p, q):
    torch.testing.assert_close(output(p, q), p, rtol=0, atol=0.006)


def test_draws_with_replacement_would_not_give_the_target(monkeypatch):
    """The fault: both children from the whole q, verified as if they were distinct."""
    right = draw_children

    def faulty(logits, uniforms, sampling):
        pairs = [right(logits, uniforms[:, j : j + 1], sampling) for j in range(uniforms.shape[1])]
        return torch.cat([choice for choice, _ in pairs], 1), pairs[0][1]

    monkeypatch.setitem(globals(), "draw_children", faulty)
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.7, 0.2, 0.1])
    assert (output(p, q) - p).abs().max() > 0.05


def test_a_tree_wider_than_the_vocabulary_is_refused():
    tree = StaticTree.from_paths([[0], [1], [2], [2, 0]])
    check_width(tree, 3)
    with pytest.raises(DraftError, match=r"3 children at one node, the draft's vocabulary 2 tokens.*narrower"):
        check_width(tree, 2)
