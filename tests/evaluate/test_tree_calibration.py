"""What a tree costs, from given seconds; and a calibration in the real loop on a tiny target."""

import pytest
import torch

from drafttrain.drafts.medusa_tree import WIDTH, hit_table, measure_ranks, replay
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.tree_calibration import TreeCost, calibrate_tree, cost_of, measure_cost, rising, timed_sizes
from drafttrain.nn.tree_growth import grow, grow_tree
from tests.tiny_drafts import make_batch, make_target, plain
from tests.tiny_medusa import make_heads


@pytest.fixture(scope="module")
def target():
    return make_target("Granite")


@pytest.fixture(scope="module")
def batch(target):
    prompt = [5, 6, 7, 8]
    text = prompt + plain(target, [prompt], 60)[0]
    return make_batch(target, torch.tensor([text]), torch.tensor([[False] * 4 + [True] * 60]))


def test_the_sizes_that_are_timed():
    assert timed_sizes(1) == [1]
    assert timed_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert timed_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_cost_from_seconds_by_hand():
    """A plain step of 10 ms, 8 of them the forward; the third repeat of all was disturbed."""
    spent = {
        0: [(0.0, 8, 2), (0.0, 8, 2), (0.0, 80, 20)],
        1: [(1.0, 10, 2), (1.0, 10, 2), (9.0, 99, 99)],
        4: [(2.0, 12, 3), (2.0, 12, 3), (9.0, 99, 99)],
        6: [(2.4, 20, 5), (2.4, 20, 5), (9.0, 99, 99)],
    }
    seconds = {
        n: [dict(zip(("draft", "verify", "rest"), one, strict=True)) for one in times] for n, times in spent.items()
    }
    cost = cost_of(seconds, {1: 1, 4: 2, 6: 2})
    assert cost.verify == pytest.approx({1: 1.0, 4: 1.2, 6: 2.0})
    assert cost.rest == pytest.approx({1: 0.2, 4: 0.3, 6: 0.5})
    assert cost.draft == pytest.approx((-0.02, 0.12))  # Through (1, .1) and (2, .22), the mean of .2 and .24.
    assert cost(5, 2) == pytest.approx(1.6 + 0.22 + 0.4)
    assert cost(5, 3) == pytest.approx(1.6 + 0.34 + 0.4)


def test_drafting_that_falls_with_depth_is_noise():
    seconds = {
        0: [{"draft": 0, "verify": 1, "rest": 0}],
        1: [{"draft": 0.3, "verify": 1, "rest": 0}],
        2: [{"draft": 0.1, "verify": 1, "rest": 0}],
    }
    assert cost_of(seconds, {1: 1, 2: 2}).draft == pytest.approx((0.2, 0.0))


def test_times_that_fall_are_pooled():
    assert rising({1: 1.0, 2: 1.5, 4: 2.0}) == {1: 1.0, 2: 1.5, 4: 2.0}
    assert rising({1: 1.0, 8: 1.25, 2: 2.0, 4: 1.0}) == {1: 1.0, 2: 4.25 / 3, 4: 4.25 / 3, 8: 4.25 / 3}


def test_given_costs_decide_between_a_small_tree_and_the_whole():
    hits = [[0.6, 0.2, 0.1]] * 3
    flat = TreeCost({1: 1.0, 16: 1.0}, {1: 0.0, 16: 0.0}, (0.0, 0.0))
    steep = TreeCost({1: 1.0, 16: 16.0}, {1: 0.0, 16: 0.0}, (0.0, 0.0))
    assert grow_tree(hits, 16, flat).tree.nodes == 16
    assert grow_tree(hits, 16, steep).tree.paths() == [[0]]


def test_costs_are_measured_in_the_loop(target, batch):
    order = grow([[0.5, 0.2, 0.1]] * 3, 6)
    cost = measure_cost(make_heads(target), target, order, batch.input_ids.tolist(), rounds=3, repeats=2)
    assert list(cost.verify) == list(cost.rest) == [1, 2, 4, 6]
    assert all(value > 0 for table in (cost.verify, cost.rest) for value in table.values())
    assert cost.draft[1] >= 0 and cost(6, 3) > cost.verify[6]


def test_a_target_without_room_for_timing_is_refused(target, batch):
    order = grow([[0.9, 0.1]] * 3, 6)
    with pytest.raises(EvaluationError, match=r"256 positions.*Mend.*tree_nodes"):
        measure_cost(make_heads(target), target, order, batch.input_ids.tolist(), rounds=200)


def test_a_calibration_says_how_the_tree_was_found(target, batch):
    draft = make_heads(target)
    ranks = measure_ranks(draft, [batch])
    hits = hit_table(ranks)
    tree, facts = calibrate_tree(draft, target, [batch], [], nodes=5)  # A given size needs no timing.
    assert (tree, facts["expected_acceptance_length"]) == ((grown := grow_tree(hits, 5)).tree, grown.tau)
    assert facts["nodes"] == tree.nodes and facts["hits"] == hits and facts["rows"] == 59
    assert facts["replayed_acceptance_length"] == replay(tree, ranks) and "v" not in facts
    assert [len(row) for row in hits] == [WIDTH] * 3

    tree, facts = calibrate_tree(draft, target, [batch], batch.input_ids.tolist())
    cost = TreeCost(facts["v"], facts["o"], facts["draft"])
    assert facts["nodes"] == tree.nodes <= 32 and 1 in facts["v"]
    assert facts["expected_speedup"] == facts["expected_acceptance_length"] / cost(tree.nodes, tree.depth)
