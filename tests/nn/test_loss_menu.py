"""The loss menu: values by hand, the theorem behind each loss, and the fused pass against the plain twins."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.nn import fused_losses, losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.recipe import TrainingConfig

P = torch.tensor([[0.5, 0.25]], dtype=torch.float64)  # Mass .75: a sub-distribution.
Q = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
SOFT = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")
MIX = {"forward_kl": 0.7, "total_variation": 2.0, "next_token": 0.3}


def plain(name, log_p, logits, target, token, objective):
    """The plain twin of a loss, [R]."""
    p = log_p.exp()
    return {
        "forward_kl": lambda: losses.forward_kl(p, logits),
        "reverse_kl": lambda: losses.reverse_kl(log_p, logits),
        "jsd": lambda: losses.jsd(p, logits, objective.jsd_beta),
        "total_variation": lambda: losses.total_variation(p, logits),
        "neg_log_alpha": lambda: losses.neg_log_alpha(p, logits),
        "lk_hybrid": lambda: losses.lk_hybrid(p, logits, objective.lk_eta),
        "cross_entropy": lambda: losses.cross_entropy(p, logits, target),
        "next_token": lambda: losses.next_token(logits, token),
    }[name]()


class Case:
    """K steps over B x T positions in fp64; full: the teacher's vocabulary is the draft's, else Vd of its V words."""

    def __init__(self, seed=0, full=False, B=2, T=9, H=5, Vd=11, V=23, K=2, bias=False, **shape):
        g = torch.Generator().manual_seed(seed)
        rand = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
        ids = torch.arange(Vd) if full else torch.arange(Vd) * 2
        self.full_head, self.ids = rand(Vd if full else V, H), ids
        states = rand(B, T, H)
        self.full_logits = states @ self.full_head.t()
        index = torch.full((len(self.full_head),), -1).index_put_((ids,), torch.arange(Vd))
        self.target = index[self.full_logits.argmax(-1)]
        self.token = index[torch.randint(0, len(self.full_head), (B, T), generator=g)]
        lse = None if full else self.full_logits.logsumexp(-1)
        rows = self.full_head[ids]
        self.teacher = DenseTeacher(lambda h: h @ rows.t(), states, lse)
        self.states = [rand(B, T, H).requires_grad_() for _ in range(K)]
        self.weight = rand(Vd, H).requires_grad_()
        self.head = DraftHead(self.weight, rand(Vd) if bias else None, **shape)
        self.valid = torch.stack([(torch.arange(T) < T - 2 - k).expand(B, T).clone() for k in range(K)])
        self.valid[:, 0, 3] = False
        self.step_weights = [0.8**k for k in range(K)]

    def fused(self, objective, chunk=None, target="known"):
        """The objective and its figures."""
        arguments = (self.states, self.head, self.valid, self.step_weights, self.teacher, objective)
        return fused_draft_loss(*arguments, self.target if target == "known" else None, self.token, chunk)[:2]

    def logits(self, k):
        """The draft's logits [R, Vd] of the rows that count at step k."""
        z = self.states[k][self.valid[k]] @ self.weight.t()
        if self.head.bias is not None:
            z = z + self.head.bias
        z = z * (self.head.scale or 1)
        return z if self.head.softcap is None else self.head.softcap * torch.tanh(z / self.head.softcap)

    def log_p(self, k, temperature=1.0):
        """The teacher's log p [R, Vd] of those rows."""
        b, row = self.valid[k].nonzero().t()
        return (self.full_logits[b, row + 1 + k] / temperature).log_softmax(-1)[:, self.ids]

    def plain(self, objective):
        """The same from whole matrices, by the definition."""
        total, figures = 0.0, torch.zeros(2, len(self.states))
        for k, weight in enumerate(self.step_weights):
            b, row = self.valid[k].nonzero().t()
            z, T = self.logits(k), objective.temperature
            target, token = self.target[b, row + 1 + k], self.token[b, row + 1 + k]
            loss = 0.0
            for name, share in objective.weights.items():
                if name in SOFT:
                    loss = loss + share * T**2 * plain(name, self.log_p(k, T), z / T, target, token, objective)
                else:
                    loss = loss + share * plain(name, self.log_p(k), z, target, token, objective)
            total = total + weight * loss.sum()
            figures[0, k], figures[1, k] = loss.sum(), losses.acceptance(self.log_p(k).exp(), z).sum()
        return total, figures

    def check(self, objective, **options):
        """Value, figures and every gradient."""
        found, figures = self.fused(objective, **options)
        expected, sums = self.plain(objective)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.stack([figures.loss, figures.alpha]), sums, rtol=1e-5, atol=1e-5)
        inputs = [self.weight, *self.states]
        for mine, wanted in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9)


# Values by hand.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward_kl", 0.5 * math.log(2) + 0.25 * math.log(1 / 3)),
        ("reverse_kl", 0.25 * math.log(1 / 2) + 0.75 * math.log(3)),
        (  # m = (.375, .5)
            "jsd",
            0.5 * (0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.5))
            + 0.5 * (0.25 * math.log(0.25 / 0.375) + 0.75 * math.log(1.5)),
        ),
        ("total_variation", 0.5),
        ("neg_log_alpha", math.log(2)),
        (
            "lk_hybrid",
            math.exp(-1.5) * (0.5 * math.log(2) + 0.25 * math.log(1 / 3)) + (1 - math.exp(-1.5)) * 0.5,
        ),
        ("cross_entropy", -math.log(0.75)),
        ("next_token", -math.log(0.25)),
    ],
)
def test_by_hand(name, expected):
    objective, one, zero = Objective.of(name), torch.tensor([1]), torch.tensor([0])
    assert plain(name, P.log(), Q.log(), one, zero, objective).item() == pytest.approx(expected, rel=1e-9)
    head = DraftHead(torch.eye(2, dtype=torch.float64))
    states = torch.zeros(1, 3, 2, dtype=torch.float64)
    states[0, 0] = Q.log()[0]
    valid = torch.tensor([[[True, False, False]]])
    # A full vocabulary of three, the draft knows two of its words; the teacher of row 0 sits at position 1.
    logits = torch.zeros(1, 3, 2, dtype=torch.float64)
    logits[0, 1] = P.log()[0] + 1.7
    teacher = DenseTeacher(lambda h: h, logits, torch.full((1, 3), 1.7, dtype=torch.float64))
    at = lambda index: torch.tensor([[-1, index, -1]])  # noqa: E731
    found, figures, _ = fused_draft_loss([states], head, valid, [1.0], teacher, objective, at(1), at(0))
    assert found.item() == pytest.approx(expected, rel=1e-9)
    assert [figures.rows.item(), figures.hits.item(), figures.alpha.item()] == [1, 1, 0.5]


# Theorems.

vectors = st.lists(st.floats(-6, 6), min_size=5, max_size=5)


def distribution(numbers):
    return torch.tensor([numbers], dtype=torch.float64).log_softmax(-1)


@settings(max_examples=40, deadline=None)
@given(vectors, vectors)
def test_theorems_of_two_distributions(a, b):
    log_p, log_q = distribution(a), distribution(b)
    p, q = log_p.exp(), log_q.exp()
    kl, tv = losses.forward_kl(p, log_q), losses.total_variation(p, log_q)
    close = lambda x, y, tolerance=1e-9: torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)  # noqa: E731
    close(losses.reverse_kl(log_p, log_q), losses.forward_kl(q, log_p))
    close(tv, 0.5 * (p - q).abs().sum(-1))
    close(losses.jsd(p, log_q, 0.3), losses.jsd(q, log_p, 0.7))
    assert kl.item() >= 2 * tv.item() ** 2 - 1e-12  # Pinsker
    assert losses.neg_log_alpha(p, log_q).item() >= tv.item() - 1e-12  # -log(1 - x) >= x
    assert losses.jsd(p, log_q).item() + 1e-12 >= 0 and losses.jsd(p, log_q).item() <= math.log(2)
    close(losses.lk_hybrid(p, log_q, 0.0), kl)
    close(losses.lk_hybrid(p, log_q, 1e6), tv)
    for one in (losses.forward_kl(p, log_p), losses.reverse_kl(log_p, log_p), losses.jsd(p, log_p)):
        close(one, torch.zeros_like(one))


@settings(max_examples=40, deadline=None)
@given(vectors, st.integers(0, 4))
def test_one_hot_teachers_give_cross_entropy(numbers, word):
    log_q = distribution(numbers)
    one_hot = torch.zeros_like(log_q).index_fill_(-1, torch.tensor([word]), 1.0)
    expected = losses.cross_entropy(one_hot, log_q, torch.tensor([word]))
    for loss in (losses.neg_log_alpha, losses.forward_kl):
        torch.testing.assert_close(loss(one_hot, log_q), expected, rtol=1e-9, atol=1e-9)


def test_jsd_scaled_tends_to_either_kl():
    log_p, log_q = distribution([1.0, -1, 0.5, 2, 0]), distribution([0.0, 1, 1, -2, 0.3])
    small = 1e-5
    forward, reverse = losses.forward_kl(log_p.exp(), log_q), losses.reverse_kl(log_p, log_q)
    assert losses.jsd(log_p.exp(), log_q, small).item() / small == pytest.approx(forward.item(), rel=1e-3)
    assert losses.jsd(log_p.exp(), log_q, 1 - small).item() / small == pytest.approx(reverse.item(), rel=1e-3)
    assert abs(forward.item() - reverse.item()) > 0.1


# The fused pass.


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("full", [True, False], ids=["full", "part"])
@pytest.mark.parametrize("name", [*SOFT, "cross_entropy", "next_token", "mix"])
def test_fused_equals_plain(name, full, chunk):
    Case(full=full).check(Objective.of(MIX if name == "mix" else name, jsd_beta=0.3, lk_eta=2.0), chunk=chunk)


@pytest.mark.parametrize("name", [*SOFT, "mix"])
def test_a_temperature_softens_both_and_leaves_labels_and_figures(name):
    Case(seed=1, full=True).check(Objective.of(MIX if name == "mix" else name, temperature=2.5), chunk=5)


@pytest.mark.parametrize("shape", [{"bias": True}, {"scale": 0.4}, {"softcap": 1.5}])
@pytest.mark.parametrize("name", ["forward_kl", "jsd", "mix"])
def test_heads_with_bias_scale_and_softcap(name, shape):
    Case(seed=2, **shape).check(Objective.of(MIX if name == "mix" else name))


def test_heads_with_everything_at_a_temperature():
    Case(seed=2, full=True, bias=True, scale=0.7, softcap=2.0).check(Objective.of(MIX, temperature=3.0), chunk=3)


@pytest.mark.parametrize("name", [name for name in (*SOFT, "mix") if name != "lk_hybrid"])
def test_gradcheck(name):
    """By finite differences; lk_hybrid's weight is detached, so its gradient is that of no function."""
    case = Case(seed=4, T=5, H=3, Vd=5, V=9, softcap=4.0)
    objective = Objective.of(MIX if name == "mix" else name)

    def value(weight, *states):
        case.head.weight, case.states = weight, list(states)
        return case.fused(objective)[0]

    assert torch.autograd.gradcheck(value, (case.weight, *case.states), fast_mode=True)


def test_blocks_of_a_chunk_change_nothing(monkeypatch):
    monkeypatch.setitem(fused_losses.BLOCK_ELEMENTS, "cpu", 3 * 11)
    monkeypatch.setattr(fused_losses, "LEAST_ROWS", 1)
    Case(seed=5).check(Objective.of(MIX))


def test_small_gradients_survive_a_temperature():
    """T^2: the gradient of a softened loss keeps its size (Hinton et al.), T = 50 near the squared-error limit."""
    case = Case(seed=6, full=True)
    sizes = []
    for temperature in (1.0, 50.0):
        found, _ = case.fused(Objective.of("forward_kl", temperature=temperature))
        sizes.append(torch.autograd.grad(found, case.states)[0].norm().item())
    assert 0.2 < sizes[1] / sizes[0] < 5


def test_without_a_target_index_the_teacher_is_asked():
    case = Case(full=True)
    known, asked = (case.fused(Objective.of("cross_entropy"), target=which) for which in ("known", None))
    assert known[0].item() == asked[0].item() and known[1].hits.tolist() == asked[1].hits.tolist()
    with pytest.raises(AssertionError, match="target_index"):
        Case().fused(Objective.of("forward_kl"), target=None)


def test_what_cannot_be_asked():
    with pytest.raises(AssertionError, match="full vocabulary"):
        Case().fused(Objective.of("forward_kl", temperature=2.0))
    with pytest.raises(AssertionError):
        Objective.of("kl")
    case = Case()
    with pytest.raises(AssertionError, match="token_index"):
        fused_draft_loss(case.states, case.head, case.valid, [1.0, 1.0], case.teacher, Objective.of("next_token"))
    case.valid[1, -1, -2] = True
    with pytest.raises(AssertionError, match="past the end"):
        case.fused(Objective.of("forward_kl"))
    with pytest.raises(AssertionError, match="bias"):
        DraftHead(case.weight, torch.zeros(11, requires_grad=True))


def extreme(draft, teacher, name):
    """One row with these logits in fp32: the loss and its gradient with respect to the logits."""
    states = torch.tensor([[draft, draft, draft]]).requires_grad_()
    logits = torch.tensor([teacher]).expand(1, 3, -1)
    valid = torch.tensor([[[True, False, False]]])
    arguments = ([states], DraftHead(torch.eye(len(draft))), valid, [1.0], DenseTeacher(lambda h: h, logits))
    loss, *_ = fused_draft_loss(*arguments, Objective.of(name))
    return loss.item(), torch.autograd.grad(loss, states)[0][0, 0]


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("teacher", [[300.0, 0.0, -300.0], [math.inf * -1, 0.0, 1.0]], ids=["underflow", "masked"])
def test_extremes_stay_finite(name, teacher):
    """p and q underflow to 0 on each other's words in fp32, or the target masks a word."""
    loss, gradient = extreme([0.0, 0.0, 250.0], teacher, name)
    assert math.isfinite(loss) and gradient.isfinite().all()


def test_reverse_kl_uses_the_log_of_an_underflowed_p():
    loss, gradient = extreme([0.0, 0.0], [200.0, 0.0], "reverse_kl")
    assert loss == pytest.approx(100 - math.log(2), rel=1e-5)  # q = 1/2 each, log p = (0, -200)
    torch.testing.assert_close(gradient, torch.tensor([-50.0, 50.0]), rtol=1e-4, atol=1e-4)


# What it costs.


class Record(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, and the shapes of all."""

    def __init__(self):
        super().__init__()
        self.largest, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, one.numel())
                self.shapes.add(tuple(one.shape))
        return out


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "mix"])
def test_the_largest_matrix_does_not_grow_with_the_rows(name, monkeypatch):
    monkeypatch.setattr(fused_losses, "CHUNK_ELEMENTS", 2 * 16 * 300)
    monkeypatch.setitem(fused_losses.BLOCK_ELEMENTS, "cpu", 4 * 300)
    monkeypatch.setattr(fused_losses, "LEAST_ROWS", 4)
    largest = []
    for T in (40, 160):
        case = Case(T=T, H=4, Vd=300, V=650, K=1)
        with Record() as record:
            loss, _ = case.fused(Objective.of(MIX if name == "mix" else name))
            loss.backward()
        assert (4, 300) in record.shapes and (16, 300) in record.shapes
        largest.append(record.largest)
    assert largest == [16 * 300] * 2


def test_a_frozen_head_has_no_gradient_buffer():
    seen = []
    for trained in (True, False):
        case = Case(T=12, H=7, Vd=300, V=650, K=1)
        case.weight.requires_grad_(trained)
        with Record() as record:
            loss, _ = case.fused(Objective.of("forward_kl"))
            loss.backward()
        seen.append((300, 7) in record.shapes)
    assert seen == [True, False] and case.weight.grad is None and case.states[0].grad.abs().sum() > 0


def test_a_head_learns_alone():
    case = Case(K=2)
    expected = torch.autograd.grad(case.plain(Objective.of("forward_kl"))[0], case.weight)[0]
    case.states = [one.detach() for one in case.states]
    loss, _ = case.fused(Objective.of("forward_kl"))
    loss.backward()
    torch.testing.assert_close(case.weight.grad, expected, rtol=1e-7, atol=1e-9)


def test_evaluation_makes_no_gradients():
    case = Case(K=1)
    with torch.no_grad():
        loss, figures = case.fused(Objective.of("forward_kl"))
    assert not loss.requires_grad
    assert figures.loss.item() == pytest.approx(case.plain(Objective.of("forward_kl"))[0].item(), rel=1e-6)


def test_from_config():
    config = TrainingConfig(loss={"jsd": 0.5, "next_token": 2}, jsd_beta=0.2, lk_eta=1.0, temperature=2.0)
    assert Objective.from_config(config) == Objective({"jsd": 0.5, "next_token": 2.0}, 0.2, 1.0, 2.0)
    assert Objective.from_config(TrainingConfig()) == Objective.of("forward_kl")
