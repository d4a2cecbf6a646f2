"""What is true of the fused losses whatever the numbers: bounds, limits and minima, for p of mass below 1 too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.nn import losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.recipe import TrainingConfig

SOFT = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")
ALL = (*SOFT, "cross_entropy", "next_token")
WEIGHTS = {name: 0.3 + 0.2 * place for place, name in enumerate(ALL)}
TINY = 1e-9
DRAFT = 5
vectors = st.lists(st.floats(-6, 6), min_size=DRAFT, max_size=DRAFT)
wider = st.lists(st.floats(-6, 6), min_size=DRAFT + 2, max_size=DRAFT + 2)


def fused(objective, logits, log_p, full=False):
    """Loss, gradient and overlap of one row; its target is word 1, its next token word 3. log_p: of the draft's words
    (`full`: logits of any size, which are the whole vocabulary).
    """
    objective = Objective.of(objective) if isinstance(objective, str) else objective
    z = torch.as_tensor(logits, dtype=torch.float64).clone().requires_grad_()
    behind = lambda x: torch.stack([torch.zeros_like(x), x])[None]  # noqa: E731
    lse = None if full else torch.zeros(1, 2, dtype=torch.float64)
    teacher = DenseTeacher(lambda h: h, behind(torch.as_tensor(log_p, dtype=torch.float64)), lse)
    head = DraftHead(torch.eye(len(z), dtype=torch.float64))
    at = lambda word: torch.tensor([[-1, word]])  # noqa: E731
    valid = torch.tensor([[[True, False]]])
    loss, figures, _ = fused_draft_loss(
        [torch.stack([z, z])[None]], head, valid, [1.0], teacher, objective, at(1), at(3)
    )
    return loss.item(), torch.autograd.grad(loss, z)[0], figures.alpha.item()


def log_softmax(numbers):
    return torch.tensor(numbers, dtype=torch.float64).log_softmax(-1)


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


# Sub-distributions: two of the teacher's words are not the draft's.


@settings(max_examples=30, deadline=None)
@given(vectors, wider)
def test_bounds_of_a_sub_distribution(a, b):
    """The mass that no draft can win back: alpha <= mass, and KL >= mass log mass (log sum inequality)."""
    log_p = log_softmax(b)[:DRAFT]
    mass = log_p.exp().sum().item()
    value = {name: fused(name, a, log_p)[0] for name in SOFT}
    alpha = fused("forward_kl", a, log_p)[2]  # fp32
    assert value["total_variation"] == pytest.approx(1 - alpha, abs=1e-6)
    assert value["total_variation"] >= 1 - mass - TINY
    assert value["neg_log_alpha"] == pytest.approx(-math.log(1 - value["total_variation"]), rel=1e-9)
    assert value["neg_log_alpha"] >= -math.log(mass) - TINY
    assert value["forward_kl"] >= mass * math.log(mass) - TINY
    assert value["reverse_kl"] >= -math.log(mass) - TINY
    w = math.exp(-3 * (1 - value["total_variation"]))
    assert value["lk_hybrid"] == pytest.approx(w * value["forward_kl"] + (1 - w) * value["total_variation"], rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(wider)
def test_the_best_draft_of_a_sub_distribution_is_p_over_its_mass(b):
    """It reaches the bounds, where every gradient but jsd's is 0: the teacher's p is not scaled up to mass 1."""
    log_p = log_softmax(b)[:DRAFT]
    mass = log_p.exp().sum().item()
    bounds = {
        "forward_kl": mass * math.log(mass),
        "reverse_kl": -math.log(mass),
        "total_variation": 1 - mass,
        "neg_log_alpha": -math.log(mass),
    }
    for name, bound in bounds.items():
        loss, gradient, _ = fused(name, log_p, log_p)
        assert loss == pytest.approx(bound, abs=1e-9)
        close(gradient, torch.zeros(DRAFT, dtype=torch.float64))
    _, gradient, _ = fused("lk_hybrid", log_p, log_p)
    close(gradient, torch.zeros(DRAFT, dtype=torch.float64))


def test_words_outside_the_draft_vocabulary_raise_the_loss():
    """p = (.4, .4) of a teacher whose third word has .2: alpha .8, not the 1 of a p scaled up."""
    loss, _, alpha = fused("total_variation", [0.0, 0.0, -40.0, -40.0], torch.tensor([0.4, 0.4, 0, 0]).log())
    assert loss == pytest.approx(0.2) and alpha == pytest.approx(0.8)


# All of them.


@settings(max_examples=30, deadline=None)
@given(vectors, wider, st.floats(-20, 20))
def test_gradients_sum_to_zero_and_a_shift_of_the_logits_changes_nothing(a, b, shift):
    log_p = log_softmax(b)[:DRAFT]
    objective = Objective.of(WEIGHTS)
    loss, gradient, _ = fused(objective, a, log_p)
    assert abs(gradient.sum().item()) < 1e-9
    shifted, same, _ = fused(objective, [x + shift for x in a], log_p)
    assert shifted == pytest.approx(loss, abs=1e-8)
    # Where q and p tie, the shift's rounding may choose the side.
    if (log_softmax(a) - log_p).abs().min() > 1e-6:
        close(same, gradient, 1e-7)


@settings(max_examples=20, deadline=None)
@given(vectors, vectors, st.sampled_from([1.0, 2.0]))
def test_a_weighted_sum_is_linear(a, b, temperature):
    """Value and gradient; the weights are those of a recipe's `training.loss`."""
    config = TrainingConfig(loss=WEIGHTS, temperature=temperature)
    loss, gradient, _ = fused(Objective.from_config(config), a, b, full=True)
    parts = {name: fused(Objective.of(name, temperature=temperature), a, b, full=True) for name in WEIGHTS}
    assert loss == pytest.approx(sum(weight * parts[name][0] for name, weight in WEIGHTS.items()), abs=1e-9)
    close(gradient, sum(weight * parts[name][1] for name, weight in WEIGHTS.items()))


@settings(max_examples=20, deadline=None)
@given(vectors)
def test_a_draft_that_equals_the_teacher_has_nothing_to_learn(a):
    for name in SOFT:
        loss, gradient, alpha = fused(name, a, a, full=True)
        assert abs(loss) < 1e-9 and alpha == pytest.approx(1, abs=1e-6)
        if name in ("forward_kl", "reverse_kl", "jsd"):  # The others have a kink there.
            close(gradient, torch.zeros(DRAFT, dtype=torch.float64))


# Each.


@settings(max_examples=30, deadline=None)
@given(vectors, vectors, st.floats(0.05, 0.95))
def test_jsd_is_symmetric_at_one_half_and_bounded_by_the_entropy_of_beta(a, b, beta):
    at = lambda x, y, share: fused(Objective.of("jsd", jsd_beta=share), x, y, full=True)[0]  # noqa: E731
    assert at(a, b, 0.5) == pytest.approx(at(b, a, 0.5), abs=1e-9)
    assert at(a, b, beta) == pytest.approx(at(b, a, 1 - beta), abs=1e-9)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert -TINY <= at(a, b, beta) <= entropy + TINY
    assert at(a, b, 0.5) <= math.log(2) + TINY


def test_jsd_of_strangers_is_log_2():
    loss, *_ = fused("jsd", [60.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 60.0], full=True)
    assert loss == pytest.approx(math.log(2), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(vectors, vectors)
def test_pinsker_and_the_sign_of_either_kl(a, b):
    """TV <= sqrt(KL / 2), both ways round; so neither KL is negative."""
    tv = fused("total_variation", a, b, full=True)[0]
    for name in ("forward_kl", "reverse_kl"):
        kl = fused(name, a, b, full=True)[0]
        assert kl >= -TINY and tv <= math.sqrt(max(kl, 0) / 2) + 1e-6
    close(fused("reverse_kl", a, b, full=True)[0], fused("forward_kl", b, a, full=True)[0])


@settings(max_examples=30, deadline=None)
@given(vectors)
def test_one_hot_teachers_make_neg_log_alpha_and_forward_kl_cross_entropy(a):
    """In the gradient too, wherever q of the word is below 1: such a teacher teaches nothing about acceptance."""
    one_hot = torch.full((DRAFT,), -math.inf).index_fill_(0, torch.tensor(1), 0.0)
    loss, gradient, _ = fused("cross_entropy", a, one_hot)
    for name in ("neg_log_alpha", "forward_kl"):
        mine, slope, _ = fused(name, a, one_hot)
        assert mine == pytest.approx(loss, abs=1e-9)
        close(slope, gradient, 1e-7)


def test_lk_hybrid_goes_from_kl_to_total_variation():
    """By its weight exp(-eta alpha): eta 0 or no overlap is KL, a great eta is TV; gradients alike."""
    a, b = [1.0, -1, 0.5, 2, 0], [0.0, 1, 1, -2, 0.3]
    far = [60.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 30.0]
    for eta, other, (x, y) in ((0.0, "forward_kl", (a, b)), (1e6, "total_variation", (a, b)), (3.0, "forward_kl", far)):
        mine, theirs = fused(Objective.of("lk_hybrid", lk_eta=eta), x, y, full=True), fused(other, x, y, full=True)
        assert mine[0] == pytest.approx(theirs[0], rel=1e-9) and abs(mine[0]) > 0.1
        close(mine[1], theirs[1], 1e-9)


def test_lk_hybrid_by_finite_differences():
    """Its weight held at the value it has here, as nothing learns through it."""
    a, log_p, step = torch.tensor([1.0, -1, 0.5, 2, 0], dtype=torch.float64), log_softmax([0.0, 1, 1, -2, 0.3, 1]), 1e-6
    p = log_p[None, :DRAFT].exp()
    w = (-3 * losses.acceptance(p, a[None])).exp().item()
    held = lambda z: w * losses.forward_kl(p, z[None]) + (1 - w) * losses.total_variation(p, z[None])  # noqa: E731
    expected = torch.cat([(held(a + step * e) - held(a - step * e)) / (2 * step) for e in torch.eye(DRAFT).double()])
    close(fused("lk_hybrid", a, log_p[:DRAFT])[1], expected, 1e-8)
    moving = lambda z: losses.lk_hybrid(p, z[None])  # noqa: E731
    through = torch.cat([(moving(a + step * e) - moving(a - step * e)) / (2 * step) for e in torch.eye(DRAFT).double()])
    assert (through - expected).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", [name for name in ALL if name != "lk_hybrid"])
def test_gradcheck(name, temperature):
    """By finite differences, over the whole vocabulary and, at T = 1, over a part of it."""
    a, b = [1.0, -1, 0.5, 2, 0], [0.0, 1, 1.3, -2, 0.3, 1]
    objective, step = Objective.of(name, jsd_beta=0.3, temperature=temperature), 1e-6
    cases = [(b[:DRAFT], True)] + ([(log_softmax(b)[:DRAFT], False)] if temperature == 1 else [])
    for teacher, full in cases:
        value = lambda z: fused(objective, z, teacher, full)[0]  # noqa: B023, E731
        base = torch.tensor(a, dtype=torch.float64)
        steps = step * torch.eye(DRAFT, dtype=torch.float64)
        expected = torch.tensor([(value(base + e) - value(base - e)) / (2 * step) for e in steps], dtype=torch.float64)
        close(fused(objective, a, teacher, full)[1], expected, 1e-7)
        assert expected.abs().max() > 1e-3
