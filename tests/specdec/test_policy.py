"""Choice of K: stopping rules by hand, goodput against brute force, and why a rule may not see the token it judges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafts.base import Proposal
from drafttrain.errors import UserError
from drafttrain.nn.sampling import Sampling, inverse_cdf
from drafttrain.specdec.certificate import chi_squared, survival
from drafttrain.specdec.decode import generate
from drafttrain.specdec.policy import (
    Confidence,
    Costs,
    EntropyBound,
    Goodput,
    Policy,
    PolicyError,
    Svip,
    parse_policy,
)
from drafttrain.specdec.verify import verify
from tests.tiny_drafts import Oracle, make_draft, make_target, plain
from tests.tiny_models import tokens

FLAT = Costs(0.0, (1.0, 1.0), 0.0)


def rows(*distributions) -> torch.Tensor:
    """Logits, off by a constant a row, of distributions."""
    offsets = torch.arange(len(distributions))[:, None] * 3.0
    return torch.tensor(distributions).log() + offsets


def test_confidence_by_hand():
    logits = rows([0.45, 0.45, 0.1], [0.35, 0.35, 0.3], [0.0, 1.0, 0.0])
    assert Confidence().stop(logits).tolist() == [False, True, False]
    assert Confidence(0.5).stop(logits).tolist() == [True, True, False]
    assert Confidence(1.0).stop(logits).tolist() == [True, True, False]
    assert Confidence().stop(logits.bfloat16()).tolist() == [False, True, False]


def test_entropy_bounds_by_hand():
    """Four equal tokens: H = ln 4 = 1.386, sqrt(H) = 1.1774, 1 - sqrt(.2 H) = .4735; a certain token: 0, 0, 1."""
    logits = rows([0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0])
    assert EntropyBound(0.473).stop(logits).tolist() == [False, False]
    assert EntropyBound(0.474).stop(logits).tolist() == [True, False]
    assert EntropyBound(1.0).stop(logits).tolist() == [True, False]
    assert EntropyBound(-0.1).stop(torch.zeros(1, 500)).tolist() == [True]  # 1 - sqrt(.2 ln 500) = -.115
    assert Svip(1.178).stop(logits).tolist() == [False, False]
    assert Svip(1.177).stop(logits).tolist() == [True, False]


def test_the_base_asks_for_everything_and_never_stops():
    policy, k = Policy(), torch.tensor([3, 0, 5])
    assert policy.limit(k).tolist() == [3, 0, 5] and not policy.watches
    assert policy.stop(torch.zeros(3, 7)).tolist() == [False] * 3
    policy.observe(k, k)


P = torch.tensor([0.5, 0.3, 0.2])
P_AFTER = torch.tensor([[0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.7, 0.1, 0.2]])
Q = torch.tensor([0.2, 0.5, 0.3])
Q_AFTER = torch.tensor([[0.1, 0.8, 0.1], [0.34, 0.33, 0.33], [0.2, 0.5, 0.3]])


def joint_p_value(lengths_of, n=20_000) -> float:
    """Two drafts, of which lengths_of(first [n], second [n]) stand to be verified, then rounds without drafts."""
    uniforms = torch.rand(n, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first = inverse_cdf(Q.expand(n, 3), uniforms[:, 0])
    second = inverse_cdf(Q_AFTER[first], uniforms[:, 1])
    q = torch.stack([Q.expand(n, 3), Q_AFTER[first]], 1)
    proposal = Proposal(torch.stack([first, second], 1), lengths_of(first, second), None, q, torch.arange(3))
    logits = torch.stack([P.expand(n, 3), P_AFTER[first], torch.full((n, 3), 1 / 3)], 1).log()
    path, after = verify(logits, proposal, Sampling(1.0, draft_mode="probabilistic"), uniforms[:, 2:5])
    accepted = (path >= 0).sum(1)
    y1 = torch.where(accepted >= 1, first, after)
    alone = inverse_cdf(P_AFTER[y1], uniforms[:, 5])
    y2 = torch.where(accepted == 2, second, torch.where(accepted == 1, after, alone))
    observed = torch.bincount(3 * y1 + y2, minlength=9).double()
    return survival(*chi_squared(observed, n * (P[:, None] * P_AFTER).flatten().double()))


@pytest.mark.parametrize("policy", [Confidence(0.45), EntropyBound(0.55), Svip(0.9)], ids=lambda policy: policy.name)
def test_stopping_before_the_draw_is_exact_and_dropping_what_was_drawn_is_not(policy):
    stops = policy.stop(Q_AFTER.log())
    assert stops.tolist() != [True] * 3 and stops.any()
    assert joint_p_value(lambda first, second: 2 - stops[first].long()) > 1e-4
    # The faulty rule looks at the second draft itself: unlikely ones are dropped after they were drawn.
    unlikely = Q_AFTER < 0.45
    assert joint_p_value(lambda first, second: 2 - unlikely[first, second].long()) < 1e-4


def observed(conditional, total=1_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """A round of `total` rows whose drafts are accepted at the given conditional rates, exactly."""
    reached = [total]
    for rate in conditional:
        reached.append(round(reached[-1] * rate))
    accepted = torch.zeros(total, dtype=torch.long)
    for count in reached[1:]:
        accepted[:count] += 1
    return torch.full((total,), len(conditional)), accepted


@pytest.mark.parametrize(
    ("a", "c", "best"), [(0.5, 0.05, 3), (0.6, 0.05, 4), (0.7, 0.05, 6), (0.8, 0.05, 8), (0.8, 0.2, 4), (0.9, 0.2, 7)]
)
def test_best_k_of_independent_acceptance(a, c, best):
    assert Goodput(Costs(c, (1.0, 1.0), 0.0), prior=a).best(20) == best


@pytest.mark.parametrize(
    ("c", "best"), [(0.1, 3), (0.078, 3), (0.075, 4), (0.007, 4), (0.0055, 5), (0.00015, 5), (0.0001, 6)]
)
def test_best_k_by_conditional_rates(c, best):
    policy = Goodput(Costs(c, (1.0, 1.0), 0.0))
    policy.observe(*observed([0.8, 0.7, 0.6, 0.5, 0.10, 0.02]))
    assert policy.best(6) == best


numbers = st.floats(0, 3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30),
    st.tuples(numbers, st.lists(st.floats(0.1, 3), min_size=1, max_size=5), numbers),
    st.integers(0, 8),
)
def test_goodput_against_brute_force(rounds, costs, most):
    policy = Goodput(Costs(*costs))
    for drafted, accepted in rounds:
        policy.observe(torch.tensor([drafted]), torch.tensor([min(drafted, accepted)]))
    rates = [policy.acceptance(i) for i in range(most)]
    assert all(0 <= rate <= 1 for rate in rates)
    c, v, o = costs
    slope = max(v[-1] - v[-2], 0) if len(v) > 1 else 0
    steps = [v[K] if len(v) > K else v[-1] + (K - len(v) + 1) * slope for K in range(most + 1)]
    tokens_of = [1 + sum(math.prod(rates[: i + 1]) for i in range(K)) for K in range(most + 1)]
    goodput = [tokens_of[K] / (steps[K] + K * c + o) for K in range(most + 1)]
    best = policy.best(most)
    assert goodput[best] == pytest.approx(max(goodput), rel=1e-12)
    assert all(smaller < goodput[best] * (1 + 1e-12) for smaller in goodput[:best])
    assert policy.limit(torch.tensor([most, 0])).tolist() == [best, 0]


def test_ties_go_to_the_smaller_k():
    assert Goodput(Costs(1.0, (1.0, 1.0), 0.0), prior=1.0).best(5) == 0  # (1 + K) / (1 + K) for every K


def test_running_estimates_by_hand():
    """Position 0: tried .5 + 2, stood .5 * .8 + 2. Position 1: tried .5 + 1 (row 0 alone came there), stood .4."""
    policy = Goodput(FLAT, memory=0.5)
    policy.observe(torch.tensor([2, 1, 0]), torch.tensor([1, 1, 0]))
    assert policy.acceptance(0) == pytest.approx(2.4 / 2.5)
    assert policy.acceptance(1) == pytest.approx(0.4 / 1.5)
    assert policy.acceptance(2) == 0.8
    policy.observe(torch.tensor([2]), torch.tensor([0]))  # Position 1 was not reached: nothing new about it.
    assert policy.acceptance(0) == pytest.approx(1.2 / 2.25)
    assert policy.acceptance(1) == pytest.approx(0.4 / 1.5)
    policy.observe(torch.tensor([0]), torch.tensor([0]))
    assert policy.acceptance(0) == pytest.approx(1.2 / 2.25)


def test_a_choice_of_zero_is_probed_and_not_for_ever():
    """A draft costs .9 plain steps: worth it only where it is accepted more often than that."""
    policy, k = Goodput(Costs(0.0, (1.0, 1.9), 0.0), probe=3), torch.tensor([2, 2, 1])
    limits = []
    for _ in range(8):
        drafted = policy.limit(k)
        limits.append(drafted.tolist())
        policy.observe(drafted, torch.zeros_like(drafted))
    zero = [0, 0, 0]
    assert limits == [zero, zero, zero, [2, 2, 1], zero, zero, zero, [2, 2, 1]]
    policy = Goodput(Costs(0.0, (1.0, 1.9), 0.0), probe=3)
    for _ in range(40):
        drafted = policy.limit(k)
        policy.observe(drafted, drafted)
    assert policy.acceptance(0) > 0.9 and policy.limit(k).tolist() == [2, 2, 1]


def test_costs():
    costs = Costs(0.1, (1.0, 1.2, 1.5), 0.05)
    assert [costs.iteration(k) for k in range(5)] == pytest.approx([1.05, 1.35, 1.75, 2.15, 2.55])
    assert Costs(0.0, (1.0, 0.9), 0.0).iteration(4) == 0.9
    paid_always = Costs(0.1, (1.0, 1.2), 0.05, round=0.3)  # also where nothing is drafted
    assert [paid_always.iteration(k) for k in (0, 1)] == pytest.approx([1.35, 1.65])
    for bad in [(-0.1, (1.0,), 0.0), (0.1, (), 0.0), (0.1, (1.0, math.nan), 0.0), (math.inf, (1.0,), 0.0)]:
        with pytest.raises(PolicyError, match="expected finite numbers"):
            Costs(*bad)
    with pytest.raises(PolicyError, match="v above 0"):
        Costs(0.1, (0.0, 1.0), 0.0)


def test_parsing():
    names = {
        "confidence": "confidence>=0.4",
        "confidence:0.6": "confidence>=0.6",
        "entropy:0.3": "1-sqrt(.2H)>=0.3",
        "svip:1.2": "sqrt(H)<=1.2",
    }
    for text, name in names.items():
        make = parse_policy(text)
        assert make(None).name == name and make(None) is not make(None)
    assert parse_policy("confidence:0.6")(FLAT).threshold == 0.6
    goodput = parse_policy(" goodput ")(FLAT)
    assert isinstance(goodput, Goodput) and goodput.costs is FLAT and not goodput.watches
    with pytest.raises(PolicyError, match="without costs"):
        parse_policy("goodput")(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected confidence"),
        ("greedy", "expected confidence"),
        ("entropy", "expected confidence"),
        ("svip:", "expected confidence"),
        ("goodput:3", "expected confidence"),
        ("confidence:", "expected confidence"),
        ("confidence:high", "a number after the colon"),
        ("confidence:0", "has 0.0, expected a probability"),
        ("confidence:1.5", "has 1.5, expected a probability"),
        ("confidence:nan", "has nan, expected a probability"),
        ("entropy:1.1", "has 1.1, expected at most 1"),
        ("entropy:-inf", "has -inf"),
        ("svip:-1", "has -1.0, expected above 0"),
    ],
)
def test_what_is_no_policy(text, message):
    with pytest.raises(PolicyError, match=message):
        parse_policy(text)
    assert issubclass(PolicyError, UserError)


def test_a_probe_needs_a_round():
    with pytest.raises(PolicyError, match="probe"):
        Goodput(FLAT, probe=0)


@pytest.mark.parametrize(
    "make",
    [Confidence, lambda: EntropyBound(0.2), lambda: Svip(1.5), lambda: Goodput(Costs(0.3, (1.0, 1.2), 0.0), probe=4)],
    ids=["confidence", "entropy", "svip", "goodput"],
)
def test_the_greedy_text_is_plain_whatever_the_policy(make):
    target = make_target()
    prompts = [tokens(1, n)[0].tolist() for n in (5, 9)]
    done = generate(
        target, prompts, make_draft(target).proposer(target), k=4, max_new_tokens=24, stop_ids=(), policy=make()
    )
    assert [g.tokens for g in done.generations] == plain(target, prompts, 24)


def test_goodput_drafts_on_while_it_pays_and_stops_when_it_does_not():
    target = make_target()
    prompts = [tokens(1, 9)[0].tolist()]
    texts = plain(target, prompts, 60)
    for right, cost, most_drafted in ((99, 0.05, None), (0, 0.5, 12)):
        policy = Goodput(Costs(cost, (1.0, 1.0), 0.0), probe=20)
        done = generate(target, prompts, Oracle(texts, right), k=4, max_new_tokens=41, stop_ids=(), policy=policy)
        assert done.generations[0].tokens == texts[0][:41]
        if most_drafted is None:
            assert done.counts.iterations == 8 and done.counts.accepted == 32  # 40 tokens in rounds of 5
        else:
            assert done.counts.drafted <= most_drafted and done.counts.iterations == 40
