"""Teachers: dense ones over a part of the vocabulary, and top-k ones against the loss over k + 1 buckets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.nn import losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher, DraftWords, SpreadWords, TopKTeacher, argmax

SOFT = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")


def one_step(z, teacher, name, target=None):
    """Loss and figures of logits z [n, Vd], one row each, with the teacher of n rows: its position 0 is not used."""
    states = torch.cat([z, z[:1]])[None]
    valid = torch.arange(len(z) + 1).lt(len(z))[None, None]
    head = DraftHead(torch.eye(z.shape[1], dtype=z.dtype))
    return fused_draft_loss([states], head, valid, [1.0], teacher, Objective.of(name), target)[:2]


def top_k(log_p, k, ids=None):
    """A top-k teacher of rows [n, V], its first position empty; ids int64 [V]: draft index of each word."""
    values, words = log_p.topk(k)
    if ids is not None:
        words = ids[words]
    behind = lambda x: torch.cat([x[:1], x])[None]  # noqa: E731
    return TopKTeacher(behind(words), behind(values))


def buckets(log_p, z, k, ids):
    """log of the teacher's and the draft's shares of the k + 1 buckets [n, k + 1], word by word."""
    out = []
    for row, logits in zip(log_p, z, strict=True):
        q, (values, words) = logits.softmax(-1), row.topk(k)
        inside = [(value, ids[word]) for value, word in zip(values, words, strict=True) if ids[word] >= 0]
        mine = [q[index] for _, index in inside]
        p = torch.stack([*(value.exp() for value, _ in inside), 1 - values.exp().sum()])
        out.append((p.log(), torch.stack([*mine, 1 - sum(mine)]).log()))
    return out


def plain(name, log_p, log_q):
    p = log_p.exp()
    return {
        "forward_kl": lambda: losses.forward_kl(p, log_q),
        "reverse_kl": lambda: losses.reverse_kl(log_p, log_q),
        "jsd": lambda: losses.jsd(p, log_q),
        "total_variation": lambda: losses.total_variation(p, log_q),
        "neg_log_alpha": lambda: losses.neg_log_alpha(p, log_q),
        "lk_hybrid": lambda: losses.lk_hybrid(p, log_q),
    }[name]()


def example(seed=0, n=4, V=12, Vd=12):
    g = torch.Generator().manual_seed(seed)
    log_p = (2 * torch.randn(n, V, generator=g, dtype=torch.float64)).log_softmax(-1)
    ids = torch.full((V,), -1)
    ids[torch.randperm(V, generator=g)[:Vd].sort().values] = torch.arange(Vd)
    return log_p, torch.randn(n, Vd, generator=g, dtype=torch.float64).requires_grad_(), ids


@pytest.mark.parametrize("Vd", [12, 8], ids=["full", "part"])
@pytest.mark.parametrize("name", SOFT)
def test_top_k_is_the_loss_of_k_plus_1_buckets(name, Vd):
    log_p, z, ids = example(Vd=Vd)
    if Vd == 8:
        assert (ids[log_p.topk(4).indices] < 0).any()
    found, figures = one_step(z, top_k(log_p, 4, ids), name)
    rows = buckets(log_p, z, 4, ids)
    expected = sum(plain(name, p[None], q[None])[0] for p, q in rows)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    mine, wanted = (torch.autograd.grad(value, z)[0] for value in (found, expected))
    torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9)
    overlap = sum(p.exp().minimum(q.exp()).sum().item() for p, q in rows)
    assert figures.alpha.item() == pytest.approx(overlap, rel=1e-6)


def true_alpha(log_p, z, ids):
    inside = ids >= 0
    p = torch.zeros(len(z), z.shape[1], dtype=z.dtype).index_copy_(1, ids[inside], log_p[:, inside].exp())
    return losses.acceptance(p, z).sum().item()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 11), st.sampled_from([12, 9]))
def test_top_k_acceptance_is_an_upper_bound(seed, k, Vd):
    log_p, z, ids = example(seed, Vd=Vd)
    _, figures = one_step(z, top_k(log_p, k, ids), "forward_kl")
    assert figures.alpha.item() >= true_alpha(log_p, z, ids) - 1e-6


@pytest.mark.parametrize("Vd", [12, 9], ids=["full", "part"])
@pytest.mark.parametrize("name", SOFT)
def test_an_empty_tail_makes_top_k_the_dense_teacher(name, Vd):
    """All the mass lies on 5 words; the others have e^-80 of it, which only reverse_kl and jsd could see, not at k."""
    log_p, z, ids = example(3, Vd=Vd)
    log_p = log_p.masked_fill(log_p < log_p.topk(5).values[:, -1:], -80).log_softmax(-1)
    z = z.detach().requires_grad_()
    found, figures = one_step(z, top_k(log_p, 12, ids), name)
    behind = torch.cat([log_p[:1], log_p])[None]
    dense = DenseTeacher(lambda h: h[:, ids >= 0], behind, torch.zeros(1, 5, dtype=torch.float64))
    expected, figures_dense = one_step(z, dense, name, torch.zeros(1, 5, dtype=torch.long))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    mine, wanted = (torch.autograd.grad(value, z)[0] for value in (found, expected))
    torch.testing.assert_close(mine, wanted, rtol=1e-7, atol=1e-9)
    assert figures.alpha.item() == pytest.approx(true_alpha(log_p, z, ids), rel=1e-6)
    assert figures.alpha.item() == pytest.approx(figures_dense.alpha.item(), rel=1e-6)
    five, _ = one_step(z, top_k(log_p, 5, ids), "total_variation")
    assert five.item() == pytest.approx(len(z) - true_alpha(log_p, z, ids), rel=1e-6)


def test_spread_by_hand():
    """Words .5 and .1 known, the second outside: the tail is .4, not .5, and follows q = (.2, .2, .6) past word 0."""
    draft = DraftWords(torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64).log())
    words = SpreadWords(torch.tensor([[0, -1]]), torch.tensor([[0.5, 0.1]], dtype=torch.float64).log(), draft)
    expected = torch.tensor([[0.5, 0.1, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(words.p, expected)
    torch.testing.assert_close(words.log_p, expected.log())
    assert words.mass.item() == pytest.approx(0.9)


def test_the_tail_is_lost_where_every_draft_word_is_known():
    draft = DraftWords(torch.tensor([[0.3, 0.7]], dtype=torch.float64).log())
    words = SpreadWords(torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.25]], dtype=torch.float64).log(), draft)
    assert words.p.tolist() == [[pytest.approx(0.25), pytest.approx(0.5)]] and words.mass.item() == pytest.approx(0.75)
    torch.testing.assert_close(words.log_p.exp(), words.p)


def test_top_k_knows_the_target_s_choice():
    log_p, z, ids = example(5, n=6, V=12, Vd=6)
    choice = ids[log_p.argmax(-1)]
    assert (choice < 0).any() and (choice >= 0).any()
    block = top_k(log_p, 3, ids).chunk(torch.arange(1, 7)).block(slice(0, 6), torch.float64)
    assert block.argmax().tolist() == choice.tolist()
    z = torch.nn.functional.one_hot(choice.clamp_min(0), 6).double()
    assert one_step(z, top_k(log_p, 3, ids), "forward_kl")[1].hits.item() == (choice >= 0).sum()


def test_a_temperature_needs_every_word():
    log_p, z, ids = example()
    states = torch.cat([z, z[:1]])[None]
    arguments = ([states], DraftHead(torch.eye(12, dtype=torch.float64)), torch.arange(5).lt(4)[None, None], [1.0])
    with pytest.raises(AssertionError, match="k likeliest"):
        fused_draft_loss(*arguments, top_k(log_p, 4), Objective.of("forward_kl", temperature=2.0))


def test_dense_mass_is_that_of_the_draft_vocabulary():
    log_p, _, ids = example(Vd=8)
    states = log_p[None] + 3.0
    block = (
        DenseTeacher(lambda h: h[:, ids >= 0], states, torch.full((1, 4), 3.0, dtype=torch.float64))
        .chunk(torch.tensor([2, 0]))
        .block(slice(0, 2), torch.float64)
    )
    words = block.words(None)
    torch.testing.assert_close(words.p, log_p[[2, 0]][:, ids >= 0].exp())
    torch.testing.assert_close(words.mass, log_p[[2, 0]][:, ids >= 0].exp().sum(-1))
    whole = DenseTeacher(lambda h: h, states).chunk(torch.tensor([2, 0])).block(slice(0, 2), torch.float64)
    torch.testing.assert_close(whole.words(None).p, log_p[[2, 0]].exp())
    assert whole.argmax().tolist() == log_p[[2, 0]].argmax(-1).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([128, 640, 100, 129]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_argmax_is_the_first_of_equals(seed, words, dtype):
    z = torch.randn(3, words, generator=torch.Generator().manual_seed(seed)).mul_(2).round_().to(dtype)
    expected = [row.tolist().index(max(row.tolist())) for row in z]
    assert argmax(z).tolist() == expected
