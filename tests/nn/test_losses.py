"""Losses: hand-computed values, and the fused pass against the plain twins in value and gradient."""

import math

import pytest
import torch

from drafttrain.nn import losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher

KL = Objective.of("forward_kl")


def test_forward_kl_by_hand():
    p = torch.tensor([[0.5, 0.25]])  # mass .75: a sub-distribution
    logits = torch.tensor([[0.0, math.log(3)]])  # q = (1/4, 3/4)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.75)
    assert losses.forward_kl(p, logits).item() == pytest.approx(expected, rel=1e-6)


def test_acceptance_is_one_minus_total_variation():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])
    assert losses.acceptance(p, q.log()).item() == pytest.approx(0.7)
    assert 1 - 0.5 * (p - q).abs().sum().item() == pytest.approx(0.7)


def test_a_target_outside_the_draft_vocabulary_is_a_miss():
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert losses.hits(logits, torch.tensor([1, -1])).tolist() == [True, False]
    assert losses.cross_entropy(torch.ones(2, 2), logits, torch.tensor([1, -1]))[1] == 0


def _case(seed=0, B=2, T=23, H=8, Vd=13, V=29, K=3):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(B, T, generator=g) < 0.85
    valid = torch.zeros(K, B, T, dtype=torch.bool)
    for k in range(K):
        for b in range(B):
            for row in range(T - 2 - k):
                valid[k, b, row] = mask[b, row + 1 : row + 3 + k].all()
    draft_ids = torch.arange(Vd) * 2
    full_head = rand(V, H)
    teacher_states = rand(B, T, H)
    full_logits = teacher_states @ full_head.t()
    argmax = full_logits.argmax(-1)
    index = torch.where((argmax % 2 == 0) & (argmax < 2 * Vd), argmax // 2, -1)
    states = [rand(B, T, H).requires_grad_() for _ in range(K)]
    head = rand(Vd, H).requires_grad_()
    teacher = DenseTeacher(lambda h: h @ full_head[draft_ids].t(), teacher_states, full_logits.logsumexp(-1))
    return states, head, valid, teacher, index


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
@pytest.mark.parametrize("chunk", [5, 512])
def test_fused_equals_plain(loss, chunk):
    states, head, valid, teacher, index = _case()
    weights = [1.0, 0.8, 0.64]
    objective, figures, _ = fused_draft_loss(
        states, DraftHead(head), valid, weights, teacher, Objective.of(loss), index, None, chunk
    )
    grads = torch.autograd.grad(objective, [head, *states])
    total, alive = 0.0, torch.ones_like(valid[0])
    for k, state in enumerate(states):
        rows = valid[k].nonzero()
        b, p = rows[:, 0], rows[:, 1]
        t = p + 1 + k
        prob = losses.teacher_probabilities(teacher.head(teacher.states[b, t]), teacher.lse[b, t])
        logits = state[b, p] @ head.t()
        twin = {
            "forward_kl": losses.forward_kl(prob, logits),
            "cross_entropy": losses.cross_entropy(prob, logits, index[b, t]),
        }[loss]
        hit = losses.hits(logits, index[b, t])
        alive[b, p] &= hit
        alive &= valid[k]
        assert figures.rows[k] == len(rows)
        assert figures.loss[k].item() == pytest.approx(twin.sum().item(), rel=1e-6)
        assert figures.hits[k] == hit.sum()
        assert figures.alpha[k].item() == pytest.approx(losses.acceptance(prob, logits).sum().item(), rel=1e-6)
        assert figures.joint[k] == alive.sum()
        total = total + weights[k] * twin.sum()
    for fused, plain in zip(grads, torch.autograd.grad(total, [head, *states]), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("shape", [{}, {"softcap": 2.0, "scale": 0.7}], ids=["plain", "shaped"])
def test_a_head_for_each_step_is_a_call_for_each_step(chunk, shape):
    """Loss, figures and gradients of three heads: those of three calls in which the other steps have no rows."""
    states, _, valid, teacher, index = _case()
    g = torch.Generator().manual_seed(9)
    matrices = [torch.randn(13, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in states]
    heads, weights = [DraftHead(matrix, **shape) for matrix in matrices], [1.0, 0.8, 0.64]
    together, figures, hit = fused_draft_loss(states, heads, valid, weights, teacher, KL, index, None, chunk)
    found = torch.autograd.grad(together, [*matrices, *states])
    total = 0.0
    for k, head in enumerate(heads):
        only = torch.zeros_like(valid)
        only[k] = valid[k]
        alone, mine, hits = fused_draft_loss(states, head, only, weights, teacher, KL, index, None, chunk)
        total = total + alone
        assert figures.rows[k] == mine.rows[k] > 0
        assert torch.equal(hit[k][valid[k].flatten()], hits[k][valid[k].flatten()])
        for name in ("loss", "hits", "alpha"):
            assert getattr(figures, name)[k].item() == pytest.approx(getattr(mine, name)[k].item(), rel=1e-6)
    torch.testing.assert_close(together, total, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(total, [*matrices, *states])
    for mine, wanted in zip(found, expected, strict=True):
        assert wanted.abs().sum() > 0
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
    alive = torch.ones_like(hit[0])
    for k in range(3):
        alive &= hit[k] & valid[k].flatten()
        assert figures.joint[k] == alive.sum()


def test_one_head_for_all_steps_is_the_same_head_for_each():
    """One matrix given three times gathers the gradients of all steps; the others' gradients stay."""
    states, head, valid, teacher, index = _case()
    arguments = (valid, [1.0, 0.8, 0.64], teacher, KL, index)
    one, figures, _ = fused_draft_loss(states, DraftHead(head), *arguments)
    each, others, _ = fused_draft_loss(states, [DraftHead(head)] * 3, *arguments)
    torch.testing.assert_close(one, each)
    torch.testing.assert_close(torch.stack([figures.loss, figures.joint]), torch.stack([others.loss, others.joint]))
    inputs = [head, *states]
    for mine, wanted in zip(torch.autograd.grad(one, inputs), torch.autograd.grad(each, inputs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def test_frozen_heads_leave_the_gradients_of_the_states():
    states, head, valid, teacher, index = _case()
    arguments = (valid, [1.0, 0.8, 0.64], teacher, KL, index)
    for frozen in (DraftHead(head.detach()), [DraftHead(head.detach())] * 3):
        objective, *_ = fused_draft_loss(states, frozen, *arguments)
        trained, *_ = fused_draft_loss(states, DraftHead(head), *arguments)
        for mine, wanted in zip(
            torch.autograd.grad(objective, states), torch.autograd.grad(trained, states), strict=True
        ):
            torch.testing.assert_close(mine, wanted)
    with pytest.raises(AssertionError, match="one for each step"):
        fused_draft_loss(states, [DraftHead(head)] * 2, *arguments)


def test_rows_that_do_not_count_get_no_gradient():
    states, head, valid, teacher, index = _case(seed=3)
    objective, *_ = fused_draft_loss(states, DraftHead(head), valid, [1.0] * 3, teacher, KL, index)
    for k, grad in enumerate(torch.autograd.grad(objective, states)):
        assert grad[~valid[k]].eq(0).all() and grad[valid[k]].abs().sum() > 0


def test_bfloat16_autocast_stays_close():
    states, head, valid, teacher, index = _case(seed=1)
    plain, *_ = fused_draft_loss(states, DraftHead(head), valid, [1.0] * 3, teacher, KL, index)
    with torch.autocast("cpu", torch.bfloat16):
        cast, *_ = fused_draft_loss(
            [s.detach().float() for s in states],
            DraftHead(head.detach().float().requires_grad_()),
            valid,
            [1.0] * 3,
            teacher,
            KL,
            index,
        )
    assert cast.item() == pytest.approx(plain.item(), rel=2e-2)
