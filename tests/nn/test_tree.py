"""Tree shapes by hand: masks, depths, rank paths, and what is no tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.nn.tree import DynamicTree, StaticTree, TreeError, ancestors, chain_parents, deepest, depths


def test_a_tree_by_hand():
    tree = StaticTree.from_paths([[0], [1], [0, 0]])
    parents = torch.tensor([tree.parents])
    assert tree.parents == (-1, -1, 0) and tree.depths == (1, 1, 2) and tree.ranks == (0, 1, 0)
    assert (tree.depth, tree.nodes) == (2, 3)
    assert ancestors(parents)[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert depths(parents).tolist() == [[1, 1, 2]]


def test_the_deepest_node_is_a_real_one():
    depth = depths(torch.tensor([[-1, 0, 1], [-1, 0, 1]]))
    assert deepest(depth, torch.tensor([3, 1])).tolist() == [3, 1]
    assert deepest(depth, torch.tensor([0, 2])).tolist() == [0, 2]


def test_a_chain_sees_what_a_causal_mask_shows():
    assert torch.equal(ancestors(chain_parents(2, 5)), torch.ones(6, 6).tril().bool().expand(2, -1, -1))
    assert depths(chain_parents(1, 4)).tolist() == [[1, 2, 3, 4]]


def test_paths_in_any_order_give_the_same_tree():
    paths = [[0, 0, 1], [1], [0, 0, 0], [0], [2], [0, 0], [1, 0]]
    tree = StaticTree.from_paths(paths)
    assert tree == StaticTree.from_paths(sorted(paths))
    assert tree.parents == (-1, -1, -1, 0, 1, 3, 3) and tree.ranks == (0, 1, 2, 0, 0, 0, 1)


@pytest.mark.parametrize("paths", [[], [[1]], [[0, 0]], [[0], [0, 1]], [[0], [-1]], [[]]])
def test_paths_without_what_comes_before_them_are_refused(paths):
    with pytest.raises(TreeError, match="expected"):
        StaticTree.from_paths(paths)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, -1), (-2,)])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(TreeError, match="breadth-first"):
        StaticTree(parents)


def test_an_empty_dynamic_tree_is_refused():
    for topk, nodes in ((0, 4), (4, 0)):
        with pytest.raises(TreeError, match="at least 1"):
            DynamicTree(topk, nodes)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_ancestors_are_what_following_parents_gives(numbers):
    parents = sorted(number % (i + 1) - 1 for i, number in enumerate(numbers))
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    seen, deep = ancestors(torch.tensor([parents]))[0], depths(torch.tensor([parents]))[0]
    for i in range(len(parents)):
        path, node = {0, i + 1}, i
        while node >= 0:
            path.add(node + 1)
            node = parents[node]
        assert set(seen[i + 1].nonzero()[:, 0].tolist()) == path
        assert deep[i] == len(path) - 1
