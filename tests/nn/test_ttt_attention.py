"""The merged attention against its dense twin, forward and backward, and the dense twin against a hand-built mask."""

import pytest
import torch

from drafttrain.nn.ttt_attention import ttt_attention, ttt_attention_dense


def _inputs(T, steps, heads=4, kv_heads=2, dim=32, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T * 10 + steps)

    def make(h):
        return torch.randn(batch, h, T, dim, generator=generator, dtype=dtype).requires_grad_()

    return make(heads), make(kv_heads), make(kv_heads), [make(kv_heads) for _ in range(2 * (steps - 1))]


def _run(attention, q, k, v, own):
    half = len(own) // 2
    out = attention(q, k, v, own[:half], own[half:])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, [q, k, v, *own], upstream)]


def _relative(a, b):
    return ((a - b).double().norm() / b.double().norm()).item()


@pytest.mark.parametrize("T", [63, 512, 1024])
@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_merged_equals_dense(T, steps, heads):
    inputs = _inputs(T, steps, *heads, batch=1 if T > 63 else 2)
    for merged, dense in zip(_run(ttt_attention, *inputs), _run(ttt_attention_dense, *inputs), strict=True):
        assert _relative(merged, dense) < 1e-5


def test_exact_in_double_precision():
    inputs = _inputs(37, 5, dtype=torch.float64)
    for merged, dense in zip(_run(ttt_attention, *inputs), _run(ttt_attention_dense, *inputs), strict=True):
        assert _relative(merged, dense) < 1e-13


def test_bfloat16_is_as_close_as_bfloat16_allows():
    inputs = _inputs(129, 4, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs[:3]], [t.detach().double() for t in inputs[3]]
    reference = _run(ttt_attention_dense, *exact[0], [t.requires_grad_() for t in exact[1]])
    for merged, dense in zip(_run(ttt_attention, *inputs), reference, strict=True):
        assert _relative(merged, dense) < 2e-2


def test_dense_twin_equals_one_softmax_under_an_explicit_mask():
    """The whole unroll as one attention over [T, sT] keys: step-0 keys causal, later steps' keys only on the
    diagonal.
    """
    T, steps = 9, 3
    q, k, v, own = _inputs(T, steps, heads=2, kv_heads=2, dim=8)
    half = len(own) // 2
    keys, values = torch.cat([k, *own[:half]], 2), torch.cat([v, *own[half:]], 2)
    mask = torch.cat([torch.ones(T, T).tril(), *[torch.eye(T)] * half], 1).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    assert torch.allclose(ttt_attention_dense(q, k, v, own[:half], own[half:]), expected, atol=1e-6)


def test_later_rows_and_other_rows_own_keys_are_invisible():
    q, k, v, own = _inputs(16, 3)
    out = ttt_attention(q, k, v, own[:2], own[2:])
    for tensor in (k, *own):
        grad = torch.autograd.grad(out[:, :, 5].sum(), tensor, retain_graph=True)[0].abs().sum((0, 1, 3))
        assert grad[6:].eq(0).all()
        assert tensor is k or grad[:5].eq(0).all()


def test_window_hides_far_keys():
    q, k, v, _ = _inputs(16, 1)
    out = ttt_attention_dense(q, k, v, window=4)
    grad = torch.autograd.grad(out[:, :, 10].sum(), k)[0].abs().sum((0, 1, 3))
    assert grad[:7].eq(0).all() and grad[7:11].gt(0).all()
