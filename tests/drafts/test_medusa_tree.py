"""The table that trees are grown from: against transformers' own forward, by hand, and against decoding."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from drafttrain.drafts.medusa_tree import Ranks, hit_table, measure_ranks, replay
from drafttrain.nn.tree import StaticTree, TreeError
from drafttrain.nn.tree_growth import grow_tree
from drafttrain.specdec.decode import generate
from tests.tiny_drafts import make_batch, make_target, plain
from tests.tiny_medusa import make_heads
from tests.tiny_models import V

K, WIDTH = 3, 40
IDS = torch.tensor(sorted({0, 1, 2, *range(7, V, 2)}))
TREE = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
KINDS = {
    "shared": {},
    "own": {"own_heads": True},
    "sequential": {"sequential": True},
    "reduced": {"ids": IDS},
}


@pytest.fixture(scope="module")
def target():
    return make_target("Granite")  # A soft-cap as low as the tiny Gemma 2 has makes ties.


@pytest.fixture(scope="module")
def batch(target):
    """Two texts of the target with a token of someone else's after every nine; the first holds two turns."""
    text = [[5, 6, 7, 8], [9, 10, 11, 12]]
    for token in range(20, 30):
        text = [row + more + [token] for row, more in zip(text, plain(target, text, 9), strict=True)]
    text = torch.tensor(text)
    mask = torch.ones_like(text, dtype=torch.bool)
    mask[:, :4] = mask[0, 20:24] = False
    return make_batch(target, text, mask)


def head_logits(target, draft, i, normed, between):
    """Head i at one position, written out: normed [H], between: the ids x[p+1] .. x[p+1+i]."""
    x = normed / draft.input_rms
    if draft.shape.sequential:
        rows = target.model.get_input_embeddings().weight[between]
        x = torch.cat([x, (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten()])
    layer = draft.blocks[i].layers[0]
    state = normed + F.silu(layer.weight @ x + layer.bias)
    weight = draft.lm_heads[i].weight if draft.lm_heads else target.model.lm_head.weight[draft.draft_ids]
    return weight @ state / 8


def ranks_by_hand(target, draft, batch):
    """For each row that counts, in order: (rank, whether the text goes on with it) of the steps that count."""
    out = target.model(input_ids=batch.input_ids, output_hidden_states=True)
    normed, choice = out.hidden_states[-1], out.logits.argmax(-1)
    for b in range(len(batch.input_ids)):
        x, answered = batch.input_ids[b].tolist(), batch.loss_mask[b].tolist()
        for p in range(len(x)):
            steps = []
            for i in range(K):
                if not all(answered[p + 1 : p + 3 + i]) or p + 2 + i >= len(x):
                    break
                z = head_logits(target, draft, i, normed[b, p], x[p + 1 : p + 2 + i])
                wanted = int(choice[b, p + 1 + i])
                place = draft.draft_ids.tolist().index(wanted) if wanted in draft.draft_ids.tolist() else None
                rank = WIDTH if place is None else int((z > z[place]).sum())
                steps.append((min(rank, WIDTH), x[p + 2 + i] == wanted))
            if steps:
                yield steps


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_hits_are_what_row_by_row_gives(target, batch, kind):
    draft = make_heads(target, **KINDS[kind])
    ranks = measure_ranks(draft, [batch], WIDTH)
    rows = list(ranks_by_hand(target, draft, batch))
    assert len(rows) == ranks.rank.shape[1] == 15 + 79 + 99  # One less than each turn has tokens.
    for n, steps in enumerate(rows):
        assert ranks.counts[:, n].tolist() == [i < len(steps) for i in range(K)]
        assert ranks.rank[: len(steps), n].tolist() == [rank for rank, _ in steps]
        assert ranks.follows[: len(steps), n].tolist() == [follows for _, follows in steps]
    table = hit_table(ranks)
    for i in range(K):
        on = [s for s in rows if len(s) > i and all(rank < WIDTH and follows for rank, follows in s[:i])]
        assert table[i] == pytest.approx([sum(s[i][0] == r for s in on) / len(on) for r in range(WIDTH)])
        assert 0 < sum(table[i]) < 1 and len(on) > 5


def test_the_targets_choice_is_found_where_it_is_not_attached(target, batch):
    draft = make_heads(target)
    asked, given = (measure_ranks(draft, [one], WIDTH) for one in (replace(batch, target_argmax=None), batch))
    assert torch.equal(asked.rank, given.rank) and torch.equal(asked.follows, given.follows)


def test_no_more_rows_are_read_than_asked_for(target, batch):
    def endless():
        while True:
            yield batch

    seen = []
    whole, ranks = (measure_ranks(make_heads(target), endless(), most=n, progress=seen.append) for n in (193, 202))
    assert seen == [193, 193, 202]
    assert torch.equal(ranks.rank, torch.cat([whole.rank, whole.rank[:, :9]], 1))


def test_data_without_a_row_that_counts_is_refused(target, batch):
    single = torch.zeros_like(batch.loss_mask)
    single[:, 9] = True
    with pytest.raises(TreeError, match=r"Mend.*tree_nodes: 0"):
        measure_ranks(make_heads(target), [replace(batch, loss_mask=single)])


def test_a_table_by_hand():
    """Width 2. Row 2 misses at once, row 3 follows its text away from the choice, row 4 ends."""
    rank = torch.tensor([[0, 1, 2, 0, 0], [0, 1, 0, 0, 0], [2, 0, 0, 0, 0]])
    counts = torch.ones(3, 5, dtype=torch.bool)
    counts[1:, 4] = False
    follows = torch.ones(3, 5, dtype=torch.bool)
    follows[0, 3] = False
    ranks = Ranks(rank, counts, follows, 2)
    assert hit_table(ranks) == [[3 / 5, 1 / 5], [1 / 2, 1 / 2], [1 / 2, 0]]
    # [0]: 3 of 5; then rows 0 of those that go on and count.
    assert replay(StaticTree.from_paths([[0], [0, 0]]), ranks) == pytest.approx(1 + 3 / 5 + 3 / 5)
    assert replay(StaticTree.from_paths([[0], [1], [0, 0]]), ranks) == pytest.approx(1 + 4 / 5 + 4 / 5 * 1 / 2)


def test_where_the_heads_are_independent_the_products_are_what_is_replayed():
    """Every combination of ranks, misses last, as often as the product of its shares in tenths."""
    shares = [[5, 3, 2], [6, 1, 3], [4, 4, 2]]
    rows = [
        ranks
        for ranks in product(range(3), repeat=3)
        for _ in range(shares[0][ranks[0]] * shares[1][ranks[1]] * shares[2][ranks[2]])
    ]
    rank = torch.tensor(rows).T
    ranks = Ranks(rank, torch.ones_like(rank, dtype=torch.bool), torch.ones_like(rank, dtype=torch.bool), 2)
    hits = hit_table(ranks)
    for found, expected in zip(hits, [[0.5, 0.3], [0.6, 0.1], [0.4, 0.4]], strict=True):
        assert found == pytest.approx(expected)
    for nodes in range(1, 15):
        grown = grow_tree(hits, nodes)
        assert grown.tree.nodes == nodes and replay(grown.tree, ranks) == pytest.approx(grown.tau)


@pytest.mark.parametrize("kind", ["shared", "sequential"])
def test_jumping_through_the_ranks_gives_what_decoding_accepts(target, kind):
    """On the target's own greedy text: each round accepts as deep as the row's ranks are in the tree, and the next row
    lies so many tokens and one further."""
    draft, prompt, count = make_heads(target, **KINDS[kind]), [5, 6, 7, 8], 60
    text = prompt + plain(target, [prompt], count)[0]
    mask = torch.tensor([[False] * len(prompt) + [True] * count])
    ranks = measure_ranks(draft, [make_batch(target, torch.tensor([text]), mask)], WIDTH)
    assert ranks.follows[ranks.counts].all()
    done = generate(target, [prompt], draft.proposer(target, TREE), k=3, max_new_tokens=count, stop_ids=())
    paths = {tuple(path) for path in TREE.paths()}
    row, accepted = 0, []
    while row < count - K - 1:  # As far as all heads have a label.
        steps = ranks.rank[:, row].tolist()
        accepted.append(next((d for d in range(K) if tuple(steps[: d + 1]) not in paths), K))
        row += accepted[-1] + 1
    delivered = done.generations[0].deliveries[1 : 1 + len(accepted)]
    assert [n - 1 for n in delivered] == accepted and sum(accepted) > 0
