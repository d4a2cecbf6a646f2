"""Loss, gradient and acceptance figures of all unroll steps in one chunked pass: [rows, vocabulary] logits exist only
for a chunk.

Rows are walked by TEACHER position: p of one position serves every unroll step that predicts it, so the teacher's
product is paid once instead of once a step. The gradient is formed in the forward and scaled in the backward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("forward_kl", "cross_entropy")


@dataclass
class StepFigures:
    """Detached fp32 sums over the valid rows of each unroll step, each [K]; divide by `rows` to read them.

    loss: the unweighted loss. hits: draft argmax = target argmax. alpha: sum min(p, q). joint: hits at this and all
    earlier steps of the same row (its mean is the teacher-forced joint acceptance at that depth).
    """

    rows: Tensor
    loss: Tensor
    hits: Tensor
    alpha: Tensor
    joint: Tensor


def fused_draft_loss(
    states: list[Tensor],
    head_weight: Tensor,
    valid: Tensor,
    step_weights: list[float],
    teacher: Callable[[Tensor], Tensor],
    teacher_states: Tensor,
    target_lse: Tensor,
    target_index: Tensor,
    loss: str = "forward_kl",
    chunk: int = 512,
) -> tuple[Tensor, StepFigures]:
    """Weighted sum of the losses of K unroll steps, and the figures of each step.

    states: K tensors [B, T, H], already normed; row p of step k predicts x[p+2+k], so its teacher sits at position
    p+1+k. head_weight [Vd, H]; valid bool [K, B, T]; teacher maps [n, Ht] of teacher_states [B, T, Ht] to logits [n,
    Vd]; target_lse fp32 [B, T] over the full vocabulary; target_index int64 [B, T]: the target's argmax as a draft
    index, -1 outside.
    """
    assert loss in LOSSES, loss
    device = states[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states[0].dtype
    valid = valid.flatten(1)
    plan = _Plan(
        valid,
        step_weights,
        teacher,
        teacher_states.flatten(0, 1),
        target_lse.flatten(),
        target_index.flatten(),
        loss,
        chunk,
        dtype,
    )
    with torch.autocast(device, enabled=False):
        objective, figures, hit = _FusedDraftLoss.apply(plan, head_weight, *[s.flatten(0, 1).to(dtype) for s in states])
    joint = (hit & valid).long().cumprod(0).sum(1).float()
    rows = valid.sum(1).float()
    return objective, StepFigures(rows, figures[0], figures[1], figures[2], joint)


@dataclass
class _Plan:
    valid: Tensor
    step_weights: list[float]
    teacher: Callable[[Tensor], Tensor]
    teacher_states: Tensor
    target_lse: Tensor
    target_index: Tensor
    loss: str
    chunk: int
    dtype: torch.dtype


class _FusedDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, head_weight, *states):
        K, rows = plan.valid.shape
        device = head_weight.device
        weight = head_weight.to(plan.dtype)
        figures = torch.zeros(3, K, device=device)
        hit = torch.zeros(K, rows, dtype=torch.bool, device=device)
        needs_grad = head_weight.requires_grad or any(s.requires_grad for s in states)
        grad_weight = torch.zeros(head_weight.shape, dtype=torch.float32, device=device) if needs_grad else None
        grad_states = [torch.zeros_like(s) for s in states] if needs_grad else None
        positions = plan.valid[0].nonzero()[:, 0] + 1
        for teacher_rows in positions.split(plan.chunk):
            target = plan.target_index[teacher_rows]
            p = plan.teacher(plan.teacher_states[teacher_rows]).float().sub_(plan.target_lse[teacher_rows, None]).exp_()
            mass = p.sum(-1)
            constant = torch.special.xlogy(p, p).sum(-1)
            for k in range(K):
                source = teacher_rows - 1 - k
                ok = (source >= 0) & plan.valid[k][source.clamp_min(0)]
                if not ok.any():
                    continue
                source = source.clamp_min(0)
                h = states[k][source]
                z = (h @ weight.t()).float()
                hit[k, source[ok]] = (z.argmax(-1) == target)[ok]
                lse = z.logsumexp(-1)
                if plan.loss == "forward_kl":
                    row_loss = constant - torch.einsum("rv,rv->r", p, z) + mass * lse
                else:
                    row_loss = (lse - z.gather(-1, target.clamp_min(0)[:, None])[:, 0]) * (target >= 0)
                q = z.sub_(lse[:, None]).exp_()
                figures[0, k] += (row_loss * ok).sum()
                figures[2, k] += (torch.minimum(p, q).sum(-1) * ok).sum()
                if needs_grad:
                    dz = (
                        _logit_gradient(plan.loss, p, q, mass, target)
                        .mul_((plan.step_weights[k] * ok)[:, None])
                        .to(plan.dtype)
                    )
                    grad_weight += dz.t() @ h
                    # `source` repeats index 0 for rows that do not count; their gradient is zero, hence add, not write.
                    grad_states[k].index_add_(0, source, dz @ weight)
        objective = sum(w * figure for w, figure in zip(plan.step_weights, figures[0], strict=True))
        figures[1] = (hit & plan.valid).sum(1).float()
        if needs_grad:
            ctx.save_for_backward(grad_weight.to(head_weight.dtype), *grad_states)
        ctx.mark_non_differentiable(figures, hit)
        return objective, figures, hit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        grad_weight, *grad_states = ctx.saved_tensors
        return None, grad * grad_weight, *[grad.to(g.dtype) * g for g in grad_states]


def _logit_gradient(loss: str, p: Tensor, q: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """d loss / d logits [n, Vd], written into q's memory."""
    if loss == "forward_kl":
        return q.mul_(mass[:, None]).sub_(p)
    known = (target >= 0).to(q.dtype)[:, None]
    return q.scatter_add_(-1, target.clamp_min(0)[:, None], -torch.ones_like(known)).mul_(known)
