"""Warping by hand, inverse CDF, streams: one request's numbers do not depend on its neighbours."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.nn.sampling import Sampling, SamplingError, Streams, greedy_choice, inverse_cdf, warp


def test_warp_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert warp(logits, Sampling(temperature=1.0)).tolist() == pytest.approx([0.5, 0.25, 0.15, 0.1])
    squared = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    assert warp(logits, Sampling(temperature=0.5)).tolist() == pytest.approx((squared / squared.sum()).tolist())
    assert warp(logits, Sampling(temperature=1.0, top_k=2)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert warp(logits, Sampling(temperature=1.0, top_p=0.7)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert warp(logits, Sampling(temperature=1.0, top_p=0.8)).tolist() == pytest.approx(
        [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]
    )
    assert warp(logits, Sampling(temperature=1.0, top_p=0.01)).tolist() == [1, 0, 0, 0]
    assert warp(logits, Sampling()).tolist() == [1, 0, 0, 0]


def test_inverse_cdf_by_hand():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.8, 0.0])
    uniforms = torch.tensor([0.0, 0.1999, 0.2001, 0.9999999999999999], dtype=torch.float64)
    assert inverse_cdf(weights.expand(4, 5), uniforms).tolist() == [1, 1, 3, 3]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_never_returns_weight_zero(weights, uniform):
    tensor = torch.tensor(weights)
    if tensor.sum() > 0:
        assert tensor[inverse_cdf(tensor, torch.tensor(uniform, dtype=torch.float64))] > 0


def test_streams_do_not_depend_on_their_neighbours():
    together = Streams(7, [0, 1, 2])
    first = together.uniforms([2, 0, 3], 3)
    together.keep([0, 2])
    second = together.uniforms([1, 2], 2)
    alone = Streams(7, [2])
    assert alone.uniforms([3], 3)[0].tolist() == first[2].tolist()
    assert alone.uniforms([2], 2)[0].tolist() == second[1].tolist()
    assert first[1].eq(0).all() and first[0, 2] == 0
    assert Streams(8, [0]).uniforms([1], 1) != Streams(7, [1]).uniforms([1], 1)


def test_nan_logits_raise():
    for function in (greedy_choice, lambda z: warp(z, Sampling(temperature=1.0)), lambda z: warp(z, Sampling())):
        with pytest.raises(SamplingError, match="NaN"):
            function(torch.tensor([0.0, float("nan"), 1.0]))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"draft_mode": "x"}])
def test_settings_out_of_range(bad):
    with pytest.raises(SamplingError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_nucleus_beyond_the_head_of_the_distribution_equals_a_full_sort(spread):
    """4,096 words: the flat case needs more than the 1,024 most likely ones, the peaked one far fewer."""
    logits = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * spread
    for row, warped in zip(
        logits.double().softmax(-1), warp(logits, Sampling(temperature=1.0, top_p=0.7)), strict=True
    ):
        order = row.argsort(descending=True).tolist()
        mass, kept = 0.0, []
        while mass < 0.7:
            kept.append(order[len(kept)])
            mass += row[kept[-1]].item()
        assert set(warped.nonzero()[:, 0].tolist()) == set(kept)
        assert warped[kept].double().tolist() == pytest.approx((row[kept] / mass).tolist(), rel=1e-4)


def test_inverse_cdf_over_many_blocks_equals_one_running_sum():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 3000, generator=generator) * (torch.rand(200, 3000, generator=generator) < 0.1)
    weights[:, 600:1200] = 0  # a whole block without weight
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    cumulative = weights.double().cumsum(-1)
    expected = (cumulative > uniforms[:, None] * cumulative[:, -1:]).long().argmax(-1)
    assert inverse_cdf(weights, uniforms).tolist() == expected.tolist()
