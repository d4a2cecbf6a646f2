"""Growth of static trees: by hand, against the enumeration of all trees, and the size that pays."""

import math
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.nn.tree import TreeError
from drafttrain.nn.tree_growth import grow, grow_tree

HITS = [[0.6, 0.3], [0.5, 0.2]]
share = st.integers(0, 20).map(lambda n: n / 40)  # Two of them add up to at most 1.
row = st.lists(share, min_size=1, max_size=2).map(lambda one: sorted(one, reverse=True))
tables = st.lists(row, min_size=1, max_size=3)


def all_trees(hits, most):
    """(tau, nodes, depth) of every set of at most `most` nodes that holds all parents and lower siblings."""
    paths = [path for d in range(1, len(hits) + 1) for path in product(*(range(len(row)) for row in hits[:d]))]
    for n in range(1, most + 1):
        for chosen in map(set, combinations(paths, n)):
            before = {(*p[:-1], p[-1] - 1) for p in chosen if p[-1]} | {p[:-1] for p in chosen if p[:-1]}
            if before <= chosen:
                tau = 1 + sum(math.prod(hits[i][r] for i, r in enumerate(path)) for path in chosen)
                yield tau, n, max(map(len, chosen))


def test_growth_by_hand():
    paths, values = zip(*grow(HITS, 99), strict=True)
    assert paths == ((0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1))  # Of the two at .3 the shallower is first.
    assert values == pytest.approx((0.6, 0.3, 0.3, 0.15, 0.12, 0.06))
    found = grow_tree(HITS, 4)
    assert found.tree.paths() == [[0], [1], [0, 0], [1, 0]]
    assert found.tau == pytest.approx(2.35) and found.speedup is None


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 5))
def test_no_tree_of_the_size_is_better(hits, nodes):
    assert grow_tree(hits, nodes).tau == pytest.approx(max(tau for tau, *_ in all_trees(hits, nodes)))


@settings(max_examples=60, deadline=None)
@given(tables, st.integers(1, 5), st.floats(0, 1), st.floats(0, 1))
def test_no_tree_pays_better(hits, nodes, wide, deep):
    def cost(n, depth):
        return 1 + wide * n + deep * depth

    found = grow_tree(hits, nodes, cost)
    assert found.speedup == pytest.approx(max(tau / cost(n, depth) for tau, n, depth in all_trees(hits, nodes)))
    assert found.speedup == pytest.approx(found.tau / cost(found.tree.nodes, found.tree.depth))


@given(tables, st.integers(1, 9))
def test_tau_is_the_mean_over_independent_ranks(hits, nodes):
    """Every combination of ranks, the one behind the last being a miss, weighed by its probability."""
    found = grow_tree(hits, nodes)
    tree = {tuple(path) for path in found.tree.paths()}
    chances = [[*row, 1 - sum(row)] for row in hits]
    tau = 0.0
    for ranks in product(*(range(len(row)) for row in chances)):
        accepted = next((d for d in range(len(ranks)) if ranks[: d + 1] not in tree), len(ranks))
        tau += math.prod(row[r] for row, r in zip(chances, ranks, strict=True)) * (1 + accepted)
    assert found.tau == pytest.approx(tau)


def test_nodes_that_are_never_accepted_are_left_out_the_first_apart():
    assert [path for path, _ in grow([[0.5, 0.0], [0.0, 0.0]], 9)] == [(0,)]
    assert grow_tree([[0.0, 0.0]], 9).tau == 1


def test_a_word_behind_one_that_is_never_right_is_reached_and_nothing_else_is():
    assert [path for path, _ in grow([[0.0, 0.5], [0.0, 0.0, 0.4, 0.0]], 9)] == [(0,), (1,), (1, 0), (1, 1), (1, 2)]
    assert [path for path, _ in grow([[0.0, 0.5], [0.0, 0.0, 0.4, 0.0]], 4)] == [(0,), (1,)]  # Zeros alone are cut off.


def test_what_a_node_costs_decides_the_size():
    hits = [[0.6, 0.2, 0.1]] * 3
    flat = grow_tree(hits, 12, lambda nodes, depth: 1.0)
    assert flat.tree.nodes == 12 and flat.speedup == flat.tau == grow_tree(hits, 12).tau
    steep = grow_tree(hits, 12, lambda nodes, depth: 1 + nodes)
    assert steep.tree.paths() == [[0]] and steep.speedup == pytest.approx(1.6 / 2)


def test_a_chain_wins_where_a_second_child_does_not_pay():
    chain = [[0], [0, 0], [0, 0, 0]]
    assert grow_tree([[0.8]] * 3, 12, lambda nodes, depth: 1.0).tree.paths() == chain
    found = grow_tree([[0.8, 0.05]] * 3, 12, lambda nodes, depth: 1 + 0.1 * max(nodes - 1, 0))
    assert found.tree.paths() == chain and found.speedup == pytest.approx(2.952 / 1.2)


def test_a_level_that_costs_more_than_it_gives_is_not_drafted():
    """The growth over both heads has the deep node second, so none of its prefixes is this tree."""
    hits = [[0.5, 0.3], [0.7, 0.0]]
    assert [path for path, _ in grow(hits, 3)] == [(0,), (0, 0), (1,)]
    found = grow_tree(hits, 3, lambda nodes, depth: 1.0 if depth == 1 else 2.0)
    assert found.tree.paths() == [[0], [1]] and found.speedup == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("hits", "nodes"),
    [
        ([], 4),
        ([[0.5], []], 4),
        ([[1.5]], 4),
        ([[0.5, -0.1]], 4),
        ([[0.7, 0.7]], 4),
        ([[math.nan]], 4),
        (HITS, 0),
    ],
)
def test_what_is_no_table_or_no_size_is_refused(hits, nodes):
    for cost in (None, lambda nodes, depth: 1.0):
        with pytest.raises(TreeError, match="expected.*Mend"):
            grow_tree(hits, nodes, cost)
