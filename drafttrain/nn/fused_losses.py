"""Loss, gradient and acceptance figures of all unroll steps in one chunked pass: [rows, vocabulary] logits exist only
for a chunk, wide (fp32) ones only for a block of it.

Rows are walked by TEACHER position: p of one position serves every unroll step that predicts it, so the teacher's
product is paid once instead of once a step. The gradient is formed in the forward, over the logits, and scaled in the
backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from drafttrain.nn.objective import Objective, Pair, combined
from drafttrain.nn.teacher import DenseChunk, DenseTeacher, DraftWords, TopKTeacher

CHUNK_ELEMENTS = 2**26
"""Logits of teacher and unroll steps that exist at once, in the compute dtype: 128 MiB in bf16."""
BLOCK_ELEMENTS = {"cpu": 2**20}
"""Elements of one wide matrix: about half a dozen of them exist, and on CPUs they are to stay in the cache."""
BLOCK_ELEMENTS_ELSEWHERE = 2**23
KERNEL_DEVICES = ("cuda",)
"""Where triton, if installed, does the rows of dense teachers (`fused_triton`), a chunk at once."""
LEAST_ROWS = 16
"""Of a chunk and of a block: with fewer, a CPU shared with others spends its time at the threads' barriers."""


@dataclass
class StepFigures:
    """Detached fp32 sums over the valid rows of each unroll step, each [K]; divide by `rows` to read them.

    loss: the objective without the steps' weights. hits: draft argmax = target argmax. alpha: sum min(p, q) at
    temperature 1. joint: hits at this and all earlier steps of the same row (its mean is the teacher-forced joint
    acceptance at that depth).

    drift [3], of drafts that tune the target: rows, sum of KL(unchanged || tuned) in nats, rows where both choose the
    same token; zeros of others.
    """

    rows: Tensor
    loss: Tensor
    hits: Tensor
    alpha: Tensor
    joint: Tensor
    drift: Tensor = field(default_factory=lambda: torch.zeros(3))


@dataclass
class DraftHead:
    """The draft's head: weight [Vd, H], bias [Vd] (frozen) or None, then logits * scale, then c * tanh(logits / c).

    The order is the target head's. A weight that does not require grad costs neither a gradient buffer nor a product.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self):
        assert self.bias is None or not self.bias.requires_grad, "the bias of a draft's head is not trained"

    def shaped(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [n, Vd] in dtype, a matrix of their own, from the bare product of states and weight."""
        z = product.to(dtype, copy=True)
        if self.bias is not None:
            z.add_(self.bias.to(dtype))
        if self.scale is not None:
            z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def unshaped(self, dz: Tensor, z: Tensor) -> Tensor:
        """The gradient with respect to the bare product, written over dz, from that with respect to the logits z."""
        if self.softcap is not None:
            dz.sub_(z.div(self.softcap).square_().mul_(dz))
        return dz if self.scale is None else dz.mul_(self.scale)


def fused_draft_loss(
    states: list[Tensor],
    head: DraftHead | Sequence[DraftHead],
    valid: Tensor,
    step_weights: list[float],
    teacher: DenseTeacher | TopKTeacher,
    objective: Objective,
    target_index: Tensor | None = None,
    token_index: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, StepFigures, Tensor]:
    """Weighted sum of the objective over K unroll steps, the figures of each step, and bool [K, B * T]: whether the
    draft's choice is the target's, where `valid` holds.

    states: K tensors [B, T, H], already normed; row p of step k predicts x[p+2+k], so its teacher sits at position
    p+1+k. head: of all steps, or one for each. valid bool [K, B, T]. target_index int64 [B, T]: the target's argmax at
    that teacher position as a draft index, -1 outside (None: the teacher is asked, which a dense one over a draft
    vocabulary cannot tell). token_index int64 [B, T]: at teacher position t the draft index of x[t+1], -1 outside; only
    next_token needs it. chunk: teacher positions at once (None: after `CHUNK_ELEMENTS`).
    """
    assert token_index is not None or "next_token" not in objective.weights, "next_token needs token_index"
    device = states[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states[0].dtype
    valid = valid.flatten(1)
    heads = (head,) if isinstance(head, DraftHead) else tuple(head)
    assert len(heads) in (1, len(states)), "one head, or one for each step"
    plan = _Plan(
        valid,
        step_weights,
        heads,
        teacher,
        objective,
        None if target_index is None else target_index.flatten(),
        None if token_index is None else token_index.flatten(),
        chunk or min(max(CHUNK_ELEMENTS // (len(heads[0].weight) * (len(states) + 1)), LEAST_ROWS), 512),
        dtype,
        torch.is_grad_enabled(),
    )
    with torch.autocast(device, enabled=False):
        flat = [s.flatten(0, 1).to(dtype) for s in states]
        loss, figures, hit = _FusedDraftLoss.apply(plan, *[head.weight for head in heads], *flat)
    joint = (hit & valid).long().cumprod(0).sum(1).float()
    rows = valid.sum(1).float()
    return loss, StepFigures(rows, figures[0], figures[1], figures[2], joint), hit


@dataclass
class _Plan:
    valid: Tensor
    step_weights: list[float]
    heads: tuple[DraftHead, ...]
    teacher: DenseTeacher | TopKTeacher
    objective: Objective
    target_index: Tensor | None
    token_index: Tensor | None
    chunk: int
    dtype: torch.dtype
    grad_enabled: bool

    def place(self, k: int) -> int:
        """Which of the heads is that of step k."""
        return min(k, len(self.heads) - 1)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of everything between two products."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def positions(self) -> Tensor:
        """The teacher positions that any step needs, int64, rising."""
        K, rows = self.valid.shape
        needed = self.valid.new_zeros(rows + K)
        for k in range(K):
            needed[1 + k : 1 + k + rows].logical_or_(self.valid[k])
        positions = needed.nonzero()[:, 0]
        assert not len(positions) or positions[-1] < rows, "a row counts whose teacher is past the end"
        return positions

    def sources(self, k: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of step k with their teacher at these positions, int64 [n], and which of them count, bool [n]; those
        that do not may name any row.
        """
        source = positions - 1 - k
        inside = source.clamp(0, self.valid.shape[1] - 1)
        return inside, (source == inside) & self.valid[k][inside]


class _FusedDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, *tensors):
        count = len(plan.heads)
        weights, states = tensors[:count], tensors[count:]
        learns_head = plan.grad_enabled and weights[0].requires_grad
        learns_states = plan.grad_enabled and any(s.requires_grad for s in states)
        run = _Pass(plan, [weight.to(plan.dtype) for weight in weights], states, learns_head, learns_states)
        for chunk in plan.positions().split(plan.chunk):
            run.chunk(chunk)
        figures = run.figures
        loss = sum(w * figure for w, figure in zip(plan.step_weights, figures[0], strict=True))
        figures[1] = (run.hit & plan.valid).sum(1)
        ctx.learns_head, ctx.learns_states, ctx.heads, ctx.steps = learns_head, learns_states, count, len(states)
        grad_heads = [grad.to(weight.dtype) for grad, weight in zip(run.grad_heads, weights, strict=False)]
        ctx.save_for_backward(*grad_heads, *run.grad_states)
        figures = figures.float()
        ctx.mark_non_differentiable(figures, run.hit)
        return loss, figures, run.hit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        scaled = [grad.to(saved.dtype) * saved for saved in ctx.saved_tensors]
        heads = scaled[: ctx.heads] if ctx.learns_head else [None] * ctx.heads
        states = scaled[-ctx.steps :] if ctx.learns_states else [None] * ctx.steps
        return None, *heads, *states


class _Pass:
    """Sums of one forward: figures [3, K] (loss, -, alpha), hit bool [K, B * T], gradients where they are wanted."""

    def __init__(
        self,
        plan: _Plan,
        weights: Sequence[Tensor],
        states: tuple[Tensor, ...],
        learns_head: bool,
        learns_states: bool,
    ):
        self.plan, self.weights, self.states = plan, weights, states
        weight = weights[0]
        device, (K, rows) = weight.device, plan.valid.shape
        self.figures = torch.zeros(3, K, dtype=plan.wide, device=device)
        self.hit = torch.zeros(K, rows, dtype=torch.bool, device=device)
        self.grad_heads = [torch.zeros_like(w, dtype=plan.wide) for w in weights] if learns_head else []
        self.grad_states = [torch.zeros_like(s) for s in states] if learns_states else []
        self.learns = learns_head or learns_states
        self.block = max(BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS_ELSEWHERE) // len(weight), LEAST_ROWS)
        self.products = [weight.new_empty(min(plan.chunk, rows), len(weight)) for _ in states]
        dense = isinstance(plan.teacher, DenseTeacher) and plan.wide == torch.float32
        self.kernel = dense and device.type in KERNEL_DEVICES and find_spec("triton") is not None

    def chunk(self, positions: Tensor) -> None:
        """The products of a chunk of teacher positions, its rows, and the products of the gradients."""
        plan = self.plan
        teacher = plan.teacher.chunk(positions)
        steps = []
        for k, states in enumerate(self.states):
            source, counts = plan.sources(k, positions)
            if counts.any():
                h = states[source]
                product = torch.mm(h, self.weights[plan.place(k)].t(), out=self.products[k][: len(positions)])
                steps.append((k, source, counts, h, product))
        if self.kernel:
            self.rows_by_kernel(teacher, positions, steps)
        else:
            self.rows_by_blocks(teacher, positions, steps)
        for k, source, _, h, gradient in steps if self.learns else ():
            place = plan.place(k)
            if self.grad_heads:
                self._add_to_head(self.grad_heads[place], gradient.t(), h)
            if self.grad_states:
                # `source` repeats rows that do not count; their gradient is zero, hence add, not write.
                self.grad_states[k].index_add_(0, source, gradient @ self.weights[place])

    def rows_by_kernel(self, chunk: DenseChunk, positions: Tensor, steps: list[tuple]) -> None:
        """Figures of a chunk at every step; its gradients are written over the products."""
        from drafttrain.nn import fused_triton

        plan, learns = self.plan, self.learns
        teacher = fused_triton.TeacherRows(chunk, plan.objective.temperature)
        target = teacher.argmax() if plan.target_index is None else plan.target_index[positions]
        token = None if plan.token_index is None else plan.token_index[positions]
        for k, source, counts, _, product in steps:
            head, weight = plan.heads[plan.place(k)], plan.step_weights[k]
            arguments = (product, teacher, plan.objective, target, token, source, counts, self.hit[k], weight, learns)
            loss, overlap = fused_triton.rows(*arguments, head.bias, head.scale, head.softcap)
            self.figures[0, k] += loss.sum()
            self.figures[2, k] += overlap.sum()

    def rows_by_blocks(self, chunk: DenseChunk | TopKTeacher, positions: Tensor, steps: list[tuple]) -> None:
        """The same in torch: wide matrices exist for a block of the rows."""
        plan = self.plan
        for start in range(0, len(positions), self.block):
            rows = slice(start, start + self.block)
            block = chunk.block(rows, plan.wide)
            target = block.argmax() if plan.target_index is None else plan.target_index[positions[rows]]
            token = None if plan.token_index is None else plan.token_index[positions[rows]]
            for k, source, counts, _, product in steps:
                self.rows(k, block, target, token, source[rows], counts[rows], product[rows])

    def rows(
        self, k: int, block, target: Tensor, token: Tensor | None, source: Tensor, counts: Tensor, product: Tensor
    ):
        """Figures of a block at step k; its gradient with respect to `product` [n, Vd] is written over it."""
        plan = self.plan
        head = plan.heads[plan.place(k)]
        draft = DraftWords(head.shaped(product, plan.wide))
        pair = soft = Pair(block.words(draft), draft)
        temperature = plan.objective.temperature
        if temperature != 1:
            softened = DraftWords(draft.z / temperature)
            soft = Pair(block.words(softened, temperature), softened)
        loss, dz = combined(plan.objective, pair, soft, target, token, self.learns)
        self.hit[k, source[counts]] = (draft.top == target)[counts]
        self.figures[0, k] += (loss * counts).sum()
        self.figures[2, k] += (pair.overlap * counts).sum()
        if self.learns:
            dz.mul_(counts.to(plan.wide).mul_(plan.step_weights[k])[:, None])
            product.copy_(head.unshaped(dz, draft.z))

    def _add_to_head(self, total: Tensor, gradient: Tensor, h: Tensor) -> None:
        if self.plan.dtype == self.plan.wide:
            total.addmm_(gradient, h)
        else:
            total += gradient @ h
