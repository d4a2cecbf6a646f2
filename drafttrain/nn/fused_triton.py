"""The rows of the fused losses as a Triton kernel: a program a row walks its words for the softmax, for the sums and to
write the gradient over the logits. Formulas as in `objective`; `losses` has the plain twins.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseChunk

if find_spec("triton") is None:

    def jit(function):
        """The module can be imported without triton, not run: `fused_losses` asks first."""
        return function

else:
    import triton.language as tl
    from triton import jit

MOST_WORDS = 4096
"""Of a row that a program holds at once."""


class TeacherRows:
    """n rows of a dense teacher, opened once for all unroll steps: logits [n, Vd], their lse fp32 [n] at T = 1 and at
    the objective's temperature, and the teacher's own choice int64 [n] (None where lse was given: not known).
    """

    def __init__(self, chunk: DenseChunk, temperature: float):
        self.logits = chunk.logits
        if chunk.lse is None:
            self.lse, self.choice = _softmax_rows(chunk.logits, 1.0)
        else:
            self.lse, self.choice = chunk.lse.float(), None
        self.soft_lse = self.lse
        if temperature != 1:
            assert chunk.lse is None, "a temperature needs a teacher over the full vocabulary (lse None)"
            self.soft_lse, _ = _softmax_rows(chunk.logits, temperature)

    def argmax(self) -> Tensor:
        """The target's argmax as a draft index, int64 [n]."""
        assert self.choice is not None, "the argmax over a draft vocabulary is not the target's: give target_index"
        return self.choice


def rows(
    product: Tensor,
    teacher: TeacherRows,
    objective: Objective,
    target: Tensor,
    token: Tensor | None,
    source: Tensor,
    counts: Tensor,
    hit: Tensor,
    step_weight: float,
    learns: bool,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The objective of each row and sum min(p, q) at T = 1, fp32 [n] each; zero where `counts`, bool [n], is False.

    product [n, Vd], at most 32 bits wide: states times the draft's head, of which bias, scale and softcap make the
    logits; where `learns`, step_weight times the objective's gradient with respect to it is written over it. target,
    token as in `combined`. hit bool [B * T]: written at source, int64 [n]: whether the draft's argmax is the target's.
    """
    assert product.stride(1) == teacher.logits.stride(1) == 1
    n, words = product.shape
    figures = torch.zeros(2, n, dtype=torch.float32, device=product.device)
    with torch.cuda.device_of(product):
        _row[(n,)](
            product,
            teacher.logits,
            teacher.lse,
            teacher.soft_lse,
            bias,
            target,
            token,
            source,
            counts.view(torch.uint8),
            hit.view(torch.uint8),
            figures,
            words,
            product.stride(0),
            teacher.logits.stride(0),
            float(step_weight),
            **constants(objective, scale, softcap, learns),
            **_launch(words),
        )
    return figures[0], figures[1]


def constants(objective: Objective, scale: float | None, softcap: float | None, learns: bool) -> dict[str, float]:
    """What the kernel is compiled for: an objective and the shape of a draft's logits."""
    names = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")
    return {
        **{name.upper(): float(objective.weights.get(name, 0)) for name in (*names, "cross_entropy", "next_token")},
        "BETA": float(objective.jsd_beta),
        "ETA": float(objective.lk_eta),
        "T": float(objective.temperature),
        "SCALE": 1.0 if scale is None else float(scale),
        "SOFTCAP": 0.0 if softcap is None else float(softcap),
        "LEARNS": learns,
    }


def _launch(words: int) -> dict[str, int]:
    block = min(max(16, 1 << (words - 1).bit_length()), MOST_WORDS)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def _softmax_rows(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log-sum-exp fp32 [n] of logits [n, V] over a temperature, and their argmax int64 [n]."""
    lse = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    top = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        words = logits.shape[1]
        _softmax_row[(len(logits),)](logits, lse, top, words, logits.stride(0), float(temperature), **_launch(words))
    return lse, top


@jit
def _softmax_row(logits, lse, top, words, stride, T: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    value, index = _softmax(logits + row * stride, None, words, T, 1.0, 0.0, BLOCK)
    tl.store(lse + row, value)
    tl.store(top + row, index.to(tl.int64))


@jit
def _row(
    product, teacher, lse, soft_lse, bias, target, token, source, counts, hit, figures,
    words, product_stride, teacher_stride, step_weight,
    FORWARD_KL: tl.constexpr, REVERSE_KL: tl.constexpr, JSD: tl.constexpr, TOTAL_VARIATION: tl.constexpr,
    NEG_LOG_ALPHA: tl.constexpr, LK_HYBRID: tl.constexpr, CROSS_ENTROPY: tl.constexpr, NEXT_TOKEN: tl.constexpr,
    BETA: tl.constexpr, ETA: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    LEARNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    product += row * product_stride
    teacher += row * teacher_stride
    if tl.load(counts + row) == 0:
        if LEARNS:
            _clear(product, words, BLOCK)
        return
    draft_lse, top = _softmax(product, bias, words, 1.0, SCALE, SOFTCAP, BLOCK)
    chosen = tl.load(target + row)
    tl.store(hit + tl.load(source + row), (top == chosen).to(tl.uint8))
    # Read before the sums: a slower warp must not find the gradient of a faster one here.
    labels, following = 0.0, chosen
    if CROSS_ENTROPY != 0:
        labels += CROSS_ENTROPY * _label(product, bias, chosen, draft_lse, SCALE, SOFTCAP)
    if NEXT_TOKEN != 0:
        following = tl.load(token + row)
        labels += NEXT_TOKEN * _label(product, bias, following, draft_lse, SCALE, SOFTCAP)
    teacher_lse = tl.load(lse + row)
    q_lse, p_lse = draft_lse, teacher_lse
    if T != 1:
        q_lse, _ = _softmax(product, bias, words, T, SCALE, SOFTCAP, BLOCK)
        p_lse = tl.load(soft_lse + row)
    overlap, below, mass, kl, reverse, from_p, from_q = _sums(
        product, bias, teacher, words, q_lse, p_lse, REVERSE_KL != 0, JSD != 0, BETA, T, SCALE, SOFTCAP, BLOCK
    )
    w = tl.exp(-ETA * overlap)
    alpha = tl.maximum(overlap, 1e-30)
    value = FORWARD_KL * kl + REVERSE_KL * reverse + JSD * (BETA * from_p + (1 - BETA) * from_q)
    value += TOTAL_VARIATION * (1 - overlap) - NEG_LOG_ALPHA * tl.log(alpha)
    value = T * T * (value + LK_HYBRID * (w * kl + (1 - w) * (1 - overlap)))
    if T != 1:
        overlap, _, _, _, _, _, _ = _sums(
            product, bias, teacher, words, draft_lse, teacher_lse, False, False, BETA, 1.0, SCALE, SOFTCAP, BLOCK
        )
    tl.store(figures + row, value + labels)
    tl.store(figures + tl.num_programs(0) + row, overlap)
    if LEARNS:
        of_kl, of_overlap = FORWARD_KL + LK_HYBRID * w, TOTAL_VARIATION + NEG_LOG_ALPHA / alpha + LK_HYBRID * (1 - w)
        _write_gradient(
            product, bias, teacher, words, draft_lse, q_lse, p_lse, chosen, following, step_weight,
            of_kl, of_overlap, mass, below, reverse, from_q,
            REVERSE_KL, JSD, CROSS_ENTROPY, NEXT_TOKEN, BETA, T, SCALE, SOFTCAP, BLOCK,
        )  # fmt: skip


@jit
def _logits(row, bias, at, inside, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Words of a row in fp32; past the end so low that their probability is 0 and its products with anything finite."""
    z = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    z *= SCALE
    if SOFTCAP != 0:
        z = SOFTCAP * (2 / (1 + tl.exp(-2 / SOFTCAP * z)) - 1)
    return tl.where(inside, z, -1e30)


@jit
def _softmax(row, bias, words, T: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """log-sum-exp of a row's logits over T, and the first of their highest."""
    lanes = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    place = lanes
    for start in range(0, words, BLOCK):
        at = start + lanes
        z = _logits(row, bias, at, at < words, SCALE, SOFTCAP) / T
        place = tl.where(z > most, at, place)
        higher = tl.maximum(most, z)
        total = total * tl.exp(most - higher) + tl.exp(z - higher)
        most = higher
    highest, first = tl.reduce((most, place), 0, _first_of_highest)
    return highest + tl.log(tl.reduce(total * tl.exp(most - highest), 0, _add)), first


@jit
def _pair(
    row, bias, teacher, at, words, q_lse, p_lse, T: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """Draft logits at T = 1; log q, q, log p, p at T. Past the end q and p are 0, the others finite."""
    z = _logits(row, bias, at, at < words, SCALE, SOFTCAP)
    log_q = z / T - q_lse
    log_p = tl.maximum(_logits(teacher, None, at, at < words, 1.0, 0.0) / T - p_lse, -1e4)
    return z, log_q, tl.exp(log_q), log_p, tl.exp(log_p)


@jit
def _log_middle(p, q, BETA: tl.constexpr):
    return tl.log(tl.maximum(BETA * p + (1 - BETA) * q, 1e-30))


@jit
def _sums(
    row, bias, teacher, words, q_lse, p_lse,
    REVERSE_KL: tl.constexpr, JSD: tl.constexpr, BETA: tl.constexpr, T: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """alpha, sum of q where q < p, sum of p, KL(p || q); where asked KL(q || p), KL(p || m), KL(q || m), else 0."""
    lanes = tl.arange(0, BLOCK)
    zero = tl.full([BLOCK], 0.0, tl.float32)
    overlap, below, mass, kl, reverse, from_p, from_q = zero, zero, zero, zero, zero, zero, zero
    for start in range(0, words, BLOCK):
        _, log_q, q, log_p, p = _pair(row, bias, teacher, start + lanes, words, q_lse, p_lse, T, SCALE, SOFTCAP)
        overlap += tl.minimum(p, q)
        below += tl.where(q < p, q, 0.0)
        mass += p
        kl += p * (log_p - log_q)
        if REVERSE_KL:
            reverse += q * (log_q - log_p)
        if JSD:
            log_m = _log_middle(p, q, BETA)
            from_p += p * (log_p - log_m)
            from_q += q * (log_q - log_m)
    return (
        tl.reduce(overlap, 0, _add),
        tl.reduce(below, 0, _add),
        tl.reduce(mass, 0, _add),
        tl.reduce(kl, 0, _add),
        tl.reduce(reverse, 0, _add),
        tl.reduce(from_p, 0, _add),
        tl.reduce(from_q, 0, _add),
    )


@jit
def _label(row, bias, index, lse, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """-log q of one word, 0 for index -1."""
    z = _logits(row, bias, tl.maximum(index, 0), index >= 0, SCALE, SOFTCAP)
    return tl.where(index >= 0, lse - z, 0.0)


@jit
def _write_gradient(
    product, bias, teacher, words, draft_lse, q_lse, p_lse, chosen, following, step_weight,
    of_kl, of_overlap, mass, below, reverse, from_q,
    REVERSE_KL: tl.constexpr, JSD: tl.constexpr, CROSS_ENTROPY: tl.constexpr, NEXT_TOKEN: tl.constexpr,
    BETA: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """of_kl, of_overlap: what the objective weighs KL(p || q) and -alpha with in this row."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, words, BLOCK):
        at = start + lanes
        z, log_q, q, log_p, p = _pair(product, bias, teacher, at, words, q_lse, p_lse, T, SCALE, SOFTCAP)
        dz = of_kl * (mass * q - p) - of_overlap * (tl.where(q < p, q, 0.0) - q * below)
        if REVERSE_KL != 0:
            dz += REVERSE_KL * q * (log_q - log_p - reverse)
        if JSD != 0:
            dz += JSD * (1 - BETA) * q * (log_q - _log_middle(p, q, BETA) - from_q)
        dz *= T
        if CROSS_ENTROPY != 0:
            dz += CROSS_ENTROPY * _label_gradient(z, draft_lse, at, chosen)
        if NEXT_TOKEN != 0:
            dz += NEXT_TOKEN * _label_gradient(z, draft_lse, at, following)
        dz *= step_weight * SCALE
        if SOFTCAP != 0:
            share = tl.where(at < words, z / SOFTCAP, 0.0)
            dz *= 1 - share * share
        tl.store(product + at, dz.to(product.dtype.element_ty), mask=at < words)


@jit
def _label_gradient(z, lse, at, index):
    return tl.where(index >= 0, tl.exp(z - lse) - tl.where(at == index, 1.0, 0.0), 0.0)


@jit
def _clear(row, words, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for start in range(0, words, BLOCK):
        at = start + lanes
        tl.store(row + at, tl.full([BLOCK], 0.0, row.dtype.element_ty), mask=at < words)


@jit
def _add(a, b):
    return a + b


@jit
def _first_of_highest(value, place, other, other_place):
    take = (value > other) | ((value == other) & (place < other_place))
    return tl.where(take, value, other), tl.where(take, place, other_place)
