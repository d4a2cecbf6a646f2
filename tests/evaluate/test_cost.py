"""The cost model: identities and best K by hand, predictions from exact parameters, and a simulated decoder as the
second method.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.evaluate.cost import (
    CostModel,
    best_k,
    break_even,
    expected_tokens,
    fit_line,
    interpolate,
    joint_from_conditional,
    model_from_runs,
    next_pays,
    rates_at,
    speedup_at,
    tau_at,
)

TRIMMED = [0.8, 0.7, 0.6, 0.5, 0.10, 0.02]


def independent(a: float, k: int = 60) -> list[float]:
    return [a**i for i in range(1, k + 1)]


@pytest.mark.parametrize(
    ("a", "k", "c", "tokens", "speedup"),
    [(0.8, 5, 0.05, 3.68928, 2.951424), (0.6, 3, 0.0, 2.176, 2.176), (0.5, 2, 0.0, 1.75, 1.75)],
)
def test_independent_acceptance(a, k, c, tokens, speedup):
    assert expected_tokens(a, k) == pytest.approx(tokens, rel=1e-12)
    assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-12)
    assert tau_at(independent(a), k) == pytest.approx(tokens, rel=1e-12)
    assert speedup_at(independent(a), k, c) == pytest.approx(speedup, rel=1e-12)
    assert expected_tokens(1.0, k) == k + 1


@pytest.mark.parametrize(
    ("a", "c", "k"), [(0.5, 0.05, 3), (0.6, 0.05, 4), (0.7, 0.05, 6), (0.8, 0.05, 8), (0.8, 0.2, 4), (0.9, 0.2, 7)]
)
def test_best_k_of_independent_acceptance(a, c, k):
    assert best_k(independent(a), c) == k
    assert best_k([a] * 60, c, reading="conditional") == k


@pytest.mark.parametrize(
    ("reading", "c", "k"),
    [
        *[("joint", 0.3124, 4), ("joint", 0.03126, 4), ("joint", 0.03124, 5), ("joint", 0.0057, 5)],
        *[("joint", 0.0055, 6), ("joint", 0.3126, 3)],
        *[("conditional", 0.0765, 4), ("conditional", 0.0061, 4), ("conditional", 0.0059, 5)],
        *[("conditional", 0.00013, 5), ("conditional", 0.00011, 6), ("conditional", 0.1, 3)],
    ],
)
def test_trimming_by_position_and_what_the_rates_mean(reading, c, k):
    assert best_k(TRIMMED, c, reading=reading) == k


def test_joint_from_conditional():
    assert joint_from_conditional([0.8, 0.5, 0.25]) == pytest.approx([0.8, 0.4, 0.1])
    assert joint_from_conditional([]) == []


def test_best_k_may_be_zero_and_v_may_grow_or_jump():
    assert best_k([0.3], c=0.5) == 0
    # tau 1.8 / 2.5 at v = (1, 1, 1.4): S(1) = 1.8 / 1.1, S(2) = 2.5 / 1.6; at v = 1.2 the second pays.
    assert best_k([0.8, 0.7], 0.1, v=[1, 1, 1.4]) == 1
    assert best_k([0.8, 0.7], 0.1, v=[1, 1, 1.2]) == 2
    # A jump at one token more, flat after it: K = 1 is worse than none, K = 4 better than both.
    steps = [1, 2, 2, 2, 2]
    assert not next_pays(independent(0.9), 0, 0.01, steps)
    assert best_k(independent(0.9, 4), 0.01, steps) == 4
    # o is paid once a round: it makes longer drafts pay.
    assert best_k([0.5, 0.22], 0.2, o=0.0) == 1 and best_k([0.5, 0.22], 0.2, o=0.5) == 2


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.floats(0.001, 0.5),
    st.floats(0, 0.2),
    st.floats(0, 0.3),
)
def test_the_marginal_rule_finds_the_best_k_while_v_is_straight(rates, c, slope, o):
    joint = joint_from_conditional(rates)
    v = [1 + slope * k for k in range(len(joint) + 1)]
    found = next((k for k in range(len(joint)) if not next_pays(joint, k, c, v, o)), len(joint))
    best = max(speedup_at(joint, k, c, v, o) for k in range(len(joint) + 1))
    assert speedup_at(joint, found, c, v, o) == pytest.approx(best, rel=1e-9)
    assert speedup_at(joint, best_k(joint, c, v, o), c, v, o) == pytest.approx(best, rel=1e-12)


def test_lines_and_interpolation():
    assert fit_line({1: 3.0, 2: 5.0, 5: 11.0}) == pytest.approx((1.0, 2.0))
    assert fit_line({4: 2.0}) == (0.0, 0.5)
    a, b = fit_line({1: 1.0, 2: 1.0, 3: 2.0})  # by the normal equations: slope 1/2, intercept 1/3
    assert (a, b) == pytest.approx((1 / 3, 1 / 2))
    points = {1.0: 1.0, 3.0: 2.0}
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 9)] == [1, 1, 1.5, 2, 2]


def test_predictions_from_exact_parameters():
    model = CostModel({3: (0.8, 0.5, 0.3)}, (0.1, 0.05), {1: 0.95, 2: 1.0, 4: 1.2}, rest=0.05, begin=0.5)
    found = model.predict(3)
    assert found == pytest.approx(
        {"k": 3, "tau": 2.6, "speedup": 2.6 / (1.2 + 0.25 + 0.05), "c": 0.25 / 3, "v": 1.2, "o": 0.05}
    )
    assert model.predict(2)["speedup"] == pytest.approx(2.3 / (1.1 + 0.2 + 0.05))
    assert model.predict(1)["speedup"] == pytest.approx(1.8 / (1.0 + 0.15 + 0.05))
    assert model.best([1, 2, 3])["k"] == 3
    # A run of 10 tokens: (E[X^2] - E[X]) / (2 E[X]) with X = 1, 2, 3, 4 at shares .2, .3, .2, .3 is (8 - 2.6) / 5.2.
    iterations = (10 + 5.4 / 5.2) / 2.6
    assert model.predict(3, 10)["speedup"] == pytest.approx(10 / (iterations * 1.5 + 0.5))
    with pytest.raises(AssertionError):
        model.predict(4)


def test_a_finite_run_as_simulated():
    rates = [0.8, 0.5, 0.3]
    model = CostModel({3: rates}, (0.0, 0.05), {1: 1.0, 4: 1.2}, begin=0.3)
    rng, total = random.Random(0), 0.0
    for _ in range(20000):
        tokens = 0
        while tokens < 79:
            draw = rng.random()
            tokens += 1 + sum(draw < rate for rate in rates)
            total += 1.35
        total += 0.3
    assert model.predict(3, 79)["speedup"] == pytest.approx(79 / (total / 20000), rel=2e-3)
    # The steady state alone would be off by more than that.
    assert model.predict(3)["speedup"] > 1.02 * model.predict(3, 79)["speedup"]


def test_lookup_drafts_min_of_its_length_and_k():
    # Nothing in half of the iterations, 1 draft in a tenth, 4 in the rest.
    model = CostModel(
        {4: (0.4, 0.3, 0.2, 0.2)}, (0.0, 0.0), {1: 1.0, 2: 1.1, 5: 2.0}, drafting={4: (0.5, 0.4, 0.4, 0.4)}
    )
    assert model.drafted(4) == pytest.approx({0: 0.5, 1: 0.1, 2: 0, 3: 0, 4: 0.4})
    assert model.drafted(2) == pytest.approx({0: 0.5, 1: 0.1, 2: 0.4})
    assert model.verify_at(4) == pytest.approx(0.5 * 1 + 0.1 * 1.1 + 0.4 * 2.0)
    assert model.verify_at(2) == pytest.approx(0.5 * 1 + 0.1 * 1.1 + 0.4 * 1.4)
    # In a batch of two the longer row counts: both find nothing in a quarter, at most one draft in .6 squared.
    two = CostModel(model.acceptance, (0, 0), model.verify, drafting=model.drafting, concurrency=2)
    assert two.drafted(2) == pytest.approx({0: 0.25, 1: 0.36 - 0.25, 2: 0.64})


def test_rates_are_interpolated_in_log_k_and_never_rise_with_position():
    table = {1: (0.6,), 4: (0.4, 0.3, 0.2, 0.1)}
    assert rates_at(table, 1) == [0.6] and rates_at(table, 4) == [0.4, 0.3, 0.2, 0.1]
    # Half way in log K; position 2 was measured at K = 4 only and keeps its ratio to position 1.
    assert rates_at(table, 2) == pytest.approx([0.5, 0.3 * 0.5 / 0.4])
    assert rates_at({4: (0.4,)}, 3) == [0.4, 0.0, 0.0]
    assert rates_at({1: (), 3: (0.0, 0.0, 0.0)}, 2) == [0.0, 0.0]


def test_interpolated_rates_against_a_mixture_of_easy_and_hard_text():
    def at(k):
        """Half of the tokens are accepted with .9, half with .3: iterations weigh by 1 / tau."""
        weights = [1 / expected_tokens(a, k) for a in (0.9, 0.3)]
        return [sum(w * a**i for w, a in zip(weights, (0.9, 0.3), strict=True)) / sum(weights) for i in range(1, k + 1)]

    calibrated = {k: at(k) for k in (1, 2, 5)}
    for k in (3, 4):
        found = tau_at(rates_at(calibrated, k), k)
        assert found == pytest.approx(tau_at(at(k), k), rel=0.015)
        assert abs(found - tau_at(at(k), k)) < abs(tau_at(at(5), k) - tau_at(at(k), k)) / 2
    assert tau_at(rates_at(calibrated, 1), 1) == pytest.approx(tau_at(at(1), 1))


def test_break_even():
    assert break_even({1: 2.0, 4: 1.5, 16: 0.5}) == pytest.approx(8.0)  # half way between 4 and 16 in log
    assert break_even({16: 0.5, 4: 1.5}) == pytest.approx(8.0)
    assert break_even({1: 1.5, 8: 1.2}) is None
    assert break_even({2: 0.9, 8: 0.8}) == 2.0
    assert break_even({1: 2.0, 8: 1.0}) == pytest.approx(8.0)
    assert break_even({}) is None


def run_of(k, rates, seconds, lengths, rounds=100, **more):
    """The keys of a report's run that the model reads; seconds a round: (draft, verify, rest)."""
    draft, verify, rest = (rounds * one for one in seconds)
    return {
        **{"k": k, "label": f"x k={k}", "rounds": rounds, "iterations": rounds, "concurrency": 1, "tree": None},
        **{"per_position_acceptance": rates, "draft_lengths": lengths, "drafted_tokens": 0},
        "seconds": {"begin": 0.4, "draft": draft, "verify": verify, "rest": rest},
        **more,
    }


def test_the_model_of_calibration_runs():
    plain = run_of(0, [], (0.0, 0.019, 0.001), [100])
    runs = [
        run_of(1, [0.6], (0.003, 0.021, 0.002), [0, 100]),
        run_of(5, [0.5, 0.4, 0.3, 0.2, 0.1], (0.007, 0.033, 0.002), [0, 0, 0, 0, 0, 100]),
    ]
    model = model_from_runs(runs, plain, {1: 0.019, 2: 0.020, 4: 0.024, 6: 0.030}, batches=4)
    assert model.draft == pytest.approx((0.1, 0.05)) and model.rest == pytest.approx(0.1)
    assert model.begin == pytest.approx(0.4 / 4 / 0.02)
    # What was calibrated comes back: S = tau / (v + K c + o) of the loop itself.
    assert model.predict(1)["speedup"] == pytest.approx(1.6 * 0.020 / 0.026)
    assert model.predict(5)["speedup"] == pytest.approx(2.5 * 0.020 / 0.042)
    # Between them: the bare forward's 1.2 plain steps, by the loop's surcharge of 1.05 .. 1.1.
    assert model.predict(3)["v"] == pytest.approx(1.2 * 1.075)
    assert model.verify_at(0) == pytest.approx(0.95)
    rates = rates_at({1: [0.6], 5: [0.5, 0.4, 0.3, 0.2, 0.1]}, 3)
    assert model.predict(3)["tau"] == pytest.approx(1 + sum(rates))
    assert rates[0] == pytest.approx(0.6 - 0.1 * math.log(3) / math.log(5))


def test_the_model_of_a_tree_looks_v_up_at_its_nodes():
    plain = run_of(0, [], (0.0, 0.02, 0.0), [100])
    tree = {"tree": {"kind": "dynamic", "topk": 4, "nodes": 15}, "drafted_tokens": 1500}
    runs = [run_of(3, [0.6, 0.4, 0.3], (0.002, 0.03, 0.0), [0, 0, 0, 100], **tree)]
    model = model_from_runs(runs, plain, {1: 0.02, 4: 0.022, 16: 0.025}, batches=1)
    assert model.nodes == {3: 15}
    assert model.predict(3)["v"] == pytest.approx(1.5)
    assert model.in_loop[3] == pytest.approx(0.03 / 0.025)


def test_lookup_calibrated_in_the_loop():
    plain = run_of(0, [], (0.0, 0.02, 0.0), [100])
    runs = [run_of(2, [0.25, 0.125], (0.0, 0.024, 0.0), [50, 10, 40])]
    model = model_from_runs(runs, plain, {1: 0.02, 2: 0.022, 3: 0.03}, batches=1)
    assert model.drafting == {2: (0.5, 0.4)}
    assert model.in_loop[2] == pytest.approx(1.2 / (0.5 * 1.0 + 0.1 * 1.1 + 0.4 * 1.5))
    assert model.predict(2)["speedup"] == pytest.approx(1.375 / 1.2)
