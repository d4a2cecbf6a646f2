"""Attention of the training-time test: a causal block of step-0 keys plus one own key for each later step.

EAGLE-3 (arXiv 2503.01840, section 3.2) unrolls the draft on its own outputs while training. At unroll step s the
query of row i sees the step-0 keys of rows <= i and its OWN keys of steps 1..s. `ttt_attention` runs the ordinary
causal flash kernel for the block, adds the s diagonal terms and merges both by log-sum-exp, so no [T, sT] mask exists
and memory stays O(T). `ttt_attention_dense` is the plain twin it is tested against.

Why the backward is exact: flash backward forms P = exp(S - lse) and D = rowsum(dO * O) from the output and
log-sum-exp it is given. Handed the MERGED pair, P is each block key's share of the whole softmax and D the whole
softmax's correction, so dQ, dK and dV of the block need no further factor; the diagonal terms have closed forms.
"""

import torch
from torch import Tensor

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)


def ttt_attention(query: Tensor, block_key: Tensor, block_value: Tensor, own_keys=(), own_values=()) -> Tensor:
    """Attention output [B, nh, T, D] of one unroll step, in the dtype of `query`; differentiable once.

    query [B, nh, T, D]; block_key, block_value [B, nkv, T, D] of step 0; own_keys, own_values: one [B, nkv, T, D] for
    each later step up to the query's own. nkv divides nh (grouped KV heads). CUDA in fp32 or fp64 and other devices
    take the dense twin.
    """
    assert len(own_keys) == len(own_values)
    assert query.shape[1] % block_key.shape[1] == 0, "query heads must be a multiple of the KV heads"
    fused = (query.device.type == "cpu" and query.dtype in _CPU_DTYPES) or (
        query.device.type == "cuda" and query.dtype in _CUDA_DTYPES
    )
    if not fused:
        return ttt_attention_dense(query, block_key, block_value, own_keys, own_values)
    return _MergedAttention.apply(query, block_key, block_value, *own_keys, *own_values)


def ttt_attention_dense(query, block_key, block_value, own_keys=(), own_values=(), window: int | None = None) -> Tensor:
    """The plain twin of `ttt_attention`: one softmax over materialised scores [B, nh, T, T + s]. Same arguments and
    result.

    `window` limits row i to the step-0 keys j with i - j < window (sliding-window drafts take this path).
    """
    groups = query.shape[1] // block_key.shape[1]
    T = query.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) * query.shape[-1] ** -0.5
    block_key, block_value = _per_query_head(block_key, groups).to(wide), _per_query_head(block_value, groups).to(wide)
    row = torch.arange(T, device=query.device)
    visible = row[:, None] >= row[None, :]
    if window is not None:
        visible &= row[:, None] - row[None, :] < window
    scores = (q @ block_key.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
    own = [(q * _per_query_head(k, groups).to(wide)).sum(-1, keepdim=True) for k in own_keys]
    probabilities = torch.cat([scores, *own], -1).softmax(-1)
    out = probabilities[..., :T] @ block_value
    for j, v in enumerate(own_values):
        out = out + probabilities[..., T + j, None] * _per_query_head(v, groups).to(wide)
    return out.to(query.dtype)


def _per_query_head(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def _flash_forward(q, k, v):
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse, ()
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
    return out, lse, tuple(rest[:6])


def _flash_backward(grad, q, k, v, out, lse, rest):
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    cum_q, cum_k, max_q, max_k, seed, offset = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
    )


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, block_k, block_v, *own):
        steps = len(own) // 2
        groups = q.shape[1] // block_k.shape[1]
        out, lse, rest = _flash_forward(q, block_k, block_v)
        shares = None
        if steps:
            scaled = q * q.shape[-1] ** -0.5
            scores = [(scaled * _per_query_head(k, groups)).sum(-1, dtype=lse.dtype) for k in own[:steps]]
            scores = torch.stack(scores, -1)
            merged = torch.logaddexp(lse, scores.logsumexp(-1))
            shares = (scores - merged[..., None]).exp()
            wide = out * (lse - merged).exp()[..., None]
            for j, v in enumerate(own[steps:]):
                wide = torch.addcmul(wide, shares[..., j, None], _per_query_head(v, groups).to(wide.dtype))
            out, lse = wide.to(q.dtype), merged
        ctx.save_for_backward(q, block_k, block_v, out, lse, shares, *own)
        ctx.steps, ctx.groups, ctx.rest = steps, groups, rest
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, block_k, block_v, out, lse, shares, *own = ctx.saved_tensors
        steps, groups = ctx.steps, ctx.groups
        grad = grad.to(q.dtype).contiguous()
        dq, dk, dv = _flash_backward(grad, q, block_k, block_v, out, lse, ctx.rest)
        if not steps:
            return dq, dk, dv
        scale = q.shape[-1] ** -0.5
        correction = (grad * out).sum(-1, dtype=lse.dtype)
        wide_dq = dq.to(lse.dtype)
        own_dk, own_dv = [], []
        for j in range(steps):
            k, v = _per_query_head(own[j], groups), _per_query_head(own[steps + j], groups)
            share = shares[..., j]
            dscore = (share * ((grad * v).sum(-1, dtype=lse.dtype) - correction) * scale)[..., None]
            wide_dq = torch.addcmul(wide_dq, dscore, k.to(wide_dq.dtype))
            own_dk.append(_sum_groups(dscore * q, groups).to(q.dtype))
            own_dv.append(_sum_groups(share[..., None] * grad, groups).to(q.dtype))
        return wide_dq.to(q.dtype), dk, dv, *own_dk, *own_dv
