"""Speculative sampling against exact enumeration, cases by hand, chi-squared tests with a wrong sampler as control."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafts.base import Proposal
from drafttrain.nn.sampling import Sampling, SamplingError, inverse_cdf, warp
from drafttrain.specdec import verify
from drafttrain.specdec.verify import verify_chain

PLAIN = Sampling(temperature=1.0, draft_mode="probabilistic")
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
ALMOST_ONE = 1 - 2.0**-53


def grid(n: int) -> torch.Tensor:
    """n uniforms in the middle of n equal parts of [0, 1): shares counted with them are exact to 1 / n."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def verify_one(p, q, tokens, uniforms, sampling=PLAIN, q_ids=None):
    """One drafted token a row: tokens [B], uniforms [B, 2]; q None is one-hot. -> accepted [B], the token after [B]."""
    B, V = len(tokens), p.shape[-1]
    proposal = Proposal(tokens[:, None], torch.ones(B, dtype=torch.long))
    if q is not None:
        proposal.q = q.expand(B, 1, len(q)).contiguous()
        proposal.q_ids = torch.arange(V) if q_ids is None else q_ids
    return verify_chain(p.log().expand(B, 2, V), proposal, sampling, uniforms)


def acceptance_and_residual(p, q, token, n=300, q_ids=None):
    """The share of accepted drafts of one token, and the distribution of its replacement, by enumeration."""
    tokens = torch.full((n,), token)
    accepted, _ = verify_one(p, q, tokens, torch.stack([grid(n), grid(n)], 1), q_ids=q_ids)
    refused = torch.stack([torch.full((n,), ALMOST_ONE, dtype=torch.float64), grid(n)], 1)
    count, replacement = verify_one(p, q, tokens, refused, q_ids=q_ids)
    residual = torch.bincount(replacement[count == 0], minlength=len(p)) / n
    return accepted.double().mean().item(), residual.tolist()


def output_distribution(p, q, n=150):
    """The distribution of the first token that comes out, enumerated over drafts, acceptance and replacement."""
    out = torch.zeros(len(p), dtype=torch.float64)
    pair = torch.cartesian_prod(grid(n), grid(n))
    for token in range(len(q)):
        accepted, after = verify_one(p, q, torch.full((n * n,), token), pair)
        first = torch.where(accepted == 1, token, after)
        out += q[token] * torch.bincount(first, minlength=len(p)) / n**2
    return out


def test_two_tokens_by_hand():
    p, q = torch.tensor([0.4, 0.6]), torch.tensor([0.6, 0.4])
    share, residual = acceptance_and_residual(p, q, 0)
    assert share == pytest.approx(2 / 3, abs=1e-9)
    assert residual == [0, 1]
    assert acceptance_and_residual(p, q, 1)[0] == 1
    assert 0.6 * share + 0.4 == pytest.approx(0.8)


def test_three_tokens_by_hand():
    shares = [acceptance_and_residual(P, Q, token)[0] for token in range(3)]
    assert shares == pytest.approx([1, 0.6, 2 / 3], abs=1e-9)
    assert sum(q * share for q, share in zip(Q.tolist(), shares, strict=True)) == pytest.approx(0.7)
    for token in (1, 2):
        assert acceptance_and_residual(P, Q, token)[1] == [1, 0, 0]
    torch.testing.assert_close(output_distribution(P, Q), P.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("token", range(3))
def test_one_hot_draft_is_accepted_with_p(token):
    share, residual = acceptance_and_residual(P, None, token)
    assert share == pytest.approx(P[token].item(), abs=1e-7)
    rest = P.clone()
    rest[token] = 0
    assert residual == pytest.approx((rest / rest.sum()).tolist(), abs=1 / 300)


def test_q_on_a_draft_vocabulary():
    q, ids = torch.tensor([0.25, 0.75]), torch.tensor([0, 2])  # token 1 is outside
    assert acceptance_and_residual(P, q, 0, q_ids=ids)[0] == 1
    share, residual = acceptance_and_residual(P, q, 2, q_ids=ids)
    assert share == pytest.approx(0.2 / 0.75, abs=1 / 300)
    assert residual == pytest.approx([0.25 / 0.55, 0.3 / 0.55, 0], abs=1 / 300)
    alpha = 0.25 + 0.75 * 0.2 / 0.75
    assert alpha == pytest.approx(torch.minimum(P[ids], q).sum().item()) and alpha <= P[ids].sum()


distributions = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(lambda w: sum(w) > 0)


@settings(max_examples=60, deadline=None)
@given(distributions, distributions)
def test_acceptance_threshold_residual_and_total(p_weights, q_weights):
    """Just below p / q a draft stands and just above it falls; min(p, q) + (1 - alpha) residual = p."""
    p = torch.tensor(p_weights, dtype=torch.float64) / sum(p_weights)
    q = torch.tensor(q_weights, dtype=torch.float64) / sum(q_weights)
    alpha = torch.minimum(p, q).sum()
    for token in q.nonzero()[:, 0].tolist():
        edge = min(1.0, (p[token] / q[token]).item())
        below, above = max(edge - 1e-5, 0) if edge else None, min(edge + 1e-5, ALMOST_ONE)
        one = torch.tensor([token])
        if below is not None:
            assert verify_one(p.float(), q.float(), one, torch.tensor([[below, 0.5]], dtype=torch.float64))[0] == 1
        if edge < 1:
            assert verify_one(p.float(), q.float(), one, torch.tensor([[above, 0.5]], dtype=torch.float64))[0] == 0
            residual = torch.tensor(acceptance_and_residual(p.float(), q.float(), token, n=500)[1])
            torch.testing.assert_close(
                torch.minimum(p, q) + (1 - alpha) * residual.double(), p, rtol=0, atol=(1 - alpha).item() / 400 + 1e-6
            )


@pytest.mark.parametrize("q", [None, Q])
@pytest.mark.parametrize("uniform", [0.0, 1e-300, ALMOST_ONE])
def test_what_the_target_never_says_is_never_accepted(q, uniform):
    p = torch.tensor([0.0, 0.6, 0.4])
    finals = grid(50)
    uniforms = torch.stack([torch.full_like(finals, uniform), finals], 1)
    accepted, after = verify_one(p, q, torch.zeros(50, dtype=torch.long), uniforms)
    assert accepted.eq(0).all() and after.ne(0).all()


def test_a_token_that_top_k_or_top_p_cuts_is_never_accepted():
    for sampling in (Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_p=0.7)):
        accepted, after = verify_one(P, None, torch.tensor([2, 2]), torch.zeros(2, 2, dtype=torch.float64), sampling)
        assert accepted.tolist() == [0, 0] and after.tolist() == [0, 0]


def test_equal_p_and_q_always_stand_and_an_empty_residual_falls_back_to_p():
    uniforms = torch.tensor([[ALMOST_ONE, 0.1]], dtype=torch.float64)
    assert verify_one(P, warp(P.log(), PLAIN), torch.tensor([1]), uniforms)[0] == 1
    above = warp(P.log(), PLAIN) * (1 + 1e-6)  # q above p by rounding, everywhere
    accepted, after = verify_one(P, above, torch.tensor([1, 1]), torch.tensor([[ALMOST_ONE, 0.1], [ALMOST_ONE, 0.9]]))
    assert accepted.tolist() == [0, 0] and after.tolist() == [0, 2]


@pytest.mark.parametrize("q", [None, Q])
def test_greedy_target_accepts_exactly_its_argmax(q):
    for draft in range(3):
        accepted, after = verify_one(P, q, torch.tensor([draft]), torch.zeros(1, 2), Sampling())
        assert accepted.item() == (draft == 0) and after.item() == 0


def test_ragged_rows_bonus_and_replacement():
    """Greedy, argmax path 1 2 0 1: all accepted: one bonus; a refusal ends the run; padding never counts."""
    path = torch.tensor([1, 2, 0, 1])
    logits = torch.nn.functional.one_hot(path, 3).float().expand(5, 4, 3)
    drafts = torch.tensor([[1, 2, 0], [1, 0, 0], [0, 2, 0], [1, 2, 0], [1, 2, 0]])
    proposal = Proposal(drafts, torch.tensor([3, 3, 3, 1, 0]))
    accepted, after = verify_chain(logits, proposal, Sampling(), torch.zeros(5, 4))
    assert accepted.tolist() == [3, 1, 0, 1, 0]
    assert after.tolist() == [1, 2, 1, 2, 1]
    sampled = verify_chain(logits * 1e4, proposal, PLAIN, torch.full((5, 4), 0.5, dtype=torch.float64))
    assert sampled[0].tolist() == accepted.tolist() and sampled[1].tolist() == after.tolist()


def test_the_final_uniform_stands_behind_the_rows_own_drafts():
    """Row 0 drafts nothing and row 1 two tokens: each final token comes from uniform number lengths[b]."""
    logits = P.log().expand(2, 3, 3)
    proposal = Proposal(torch.tensor([[0, 0], [0, 0]]), torch.tensor([0, 2]))
    uniforms = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.1, 0.6]], dtype=torch.float64)
    accepted, after = verify_chain(logits, proposal, PLAIN, uniforms)
    assert accepted.tolist() == [0, 2] and after.tolist() == [2, 1]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN])
def test_nan_raises(sampling):
    logits = torch.zeros(1, 2, 3)
    logits[0, 1, 2] = torch.nan
    with pytest.raises(SamplingError, match="NaN"):
        verify_chain(logits, Proposal(torch.tensor([[0]]), torch.tensor([1])), sampling, torch.zeros(1, 2))


def p_value(observed, expected) -> float:
    """The chance of a chi-squared statistic at least as large, one cell an entry, totals equal."""
    assert expected.min() >= 5 and torch.isclose(observed.sum(), expected.sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


DRAWS = 20_000
FIRST, SECOND = P, torch.tensor([[0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.7, 0.1, 0.2]])
Q_SECOND = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.25, 0.25], [0.2, 0.5, 0.3]])


def single_draws(mode: str, n=DRAWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    tokens = inverse_cdf(Q.expand(n, 3), uniforms[:, 0]) if mode == "probabilistic" else torch.full((n,), 1)
    accepted, after = verify_one(P, Q if mode == "probabilistic" else None, tokens, uniforms[:, 1:])
    return torch.where(accepted == 1, tokens, after)


def verify_drafts(drafts, q, logits, uniforms):
    """A round of drafts [n, K], full rows; q [n, K, 3] or None."""
    proposal = Proposal(
        drafts, torch.full((len(drafts),), drafts.shape[1]), None, q, None if q is None else torch.arange(3)
    )
    return verify_chain(logits, proposal, PLAIN, uniforms)


def joint_draws(mode: str, n=DRAWS) -> torch.Tensor:
    """Pairs of tokens from a round of two drafts and, where it stopped at once, a second round for the second token."""
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(2, n, 5, generator=generator, dtype=torch.float64)
    after_all = torch.full((n, 3), 1 / 3)

    def draw(q, numbers):
        return inverse_cdf(q, numbers) if mode == "probabilistic" else q.argmax(-1)

    first = draw(Q.expand(n, 3), uniforms[0, :, 0])
    second = draw(Q_SECOND[first], uniforms[0, :, 1])
    q = torch.stack([Q.expand(n, 3), Q_SECOND[first]], 1) if mode == "probabilistic" else None
    logits = torch.stack([FIRST.expand(n, 3), SECOND[first], after_all], 1).log()
    accepted, after = verify_drafts(torch.stack([first, second], 1), q, logits, uniforms[0, :, 2:])
    y1 = torch.where(accepted >= 1, first, after)
    # Next round, for rows that emitted one token only: one draft after it.
    again = draw(Q_SECOND[y1], uniforms[1, :, 0])
    q = Q_SECOND[y1][:, None] if mode == "probabilistic" else None
    logits = torch.stack([SECOND[y1], after_all], 1).log()
    stands, replacement = verify_drafts(again[:, None], q, logits, uniforms[1, :, 1:3])
    later = torch.where(stands == 1, again, replacement)
    y2 = torch.where(accepted == 2, second, torch.where(accepted == 1, after, later))
    return torch.bincount(3 * y1 + y2, minlength=9).double()


@pytest.mark.parametrize("mode", ["one_hot", "probabilistic"])
def test_output_is_distributed_as_the_target(mode):
    counts = torch.bincount(single_draws(mode), minlength=3).double()
    assert p_value(counts, DRAWS * P.double()) > 1e-4
    assert p_value(joint_draws(mode), DRAWS * (FIRST[:, None] * SECOND).flatten().double()) > 1e-4


def test_resampling_from_p_instead_of_the_residual_is_caught(monkeypatch):
    monkeypatch.setattr(verify, "_residual", lambda p, *rest: p)
    wrong = torch.tensor([0.35, 0.39, 0.26], dtype=torch.float64)
    torch.testing.assert_close(output_distribution(P, Q), wrong, rtol=0, atol=1e-5)
    counts = torch.bincount(single_draws("probabilistic"), minlength=3).double()
    assert p_value(counts, DRAWS * wrong) > 1e-4
    assert p_value(counts, DRAWS * P.double()) < 1e-4
    for mode in ("one_hot", "probabilistic"):
        assert p_value(joint_draws(mode), DRAWS * (FIRST[:, None] * SECOND).flatten().double()) < 1e-4


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6), Sampling(temperature=1.3, top_k=3, top_p=0.9)])
def test_warped_p_and_q(sampling):
    """p and q after temperature, top-k and top-p: the warped p comes out, exactly, whatever q was cut to."""
    logits = torch.tensor([1.2, 0.1, -0.4, 0.7, -2.0])
    p, q = warp(logits, sampling), warp(torch.tensor([0.3, 1.1, 0.9, -0.2, 0.0]), sampling)
    n, out = 200, torch.zeros(5, dtype=torch.float64)
    pair = torch.cartesian_prod(grid(n), grid(n))
    for token in q.nonzero()[:, 0].tolist():
        tokens = torch.full((n * n,), token)
        q_rows = q.expand(n * n, 1, 5).contiguous()
        proposal = Proposal(tokens[:, None], torch.ones_like(tokens), None, q_rows, torch.arange(5))
        accepted, after = verify_chain(logits.expand(n * n, 2, 5), proposal, sampling, pair)
        out += q[token] * torch.bincount(torch.where(accepted == 1, tokens, after), minlength=5) / n**2
    torch.testing.assert_close(out, p.double(), rtol=0, atol=5e-3)
    assert out[p == 0].eq(0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(2, 9), st.sampled_from(["greedy", "one_hot", "drawn"]))
def test_an_iteration_yields_one_to_k_plus_one_tokens(seed, K, vocabulary, mode):
    """Whatever p, q and K: accepted drafts lead the row, and exactly one bonus or replacement follows that p allows."""
    generator = torch.Generator().manual_seed(seed)
    B = 8
    logits = torch.randn(B, K + 1, vocabulary, generator=generator) * 3
    q = torch.rand(B, K, vocabulary, generator=generator).softmax(-1)
    lengths = torch.randint(0, K + 1, (B,), generator=generator)
    tokens = torch.randint(0, vocabulary, (B, K), generator=generator)
    drawn = (q, torch.arange(vocabulary)) if mode == "drawn" else (None, None)
    sampling = Sampling() if mode == "greedy" else Sampling(temperature=1.0, top_k=2)
    uniforms = torch.rand(B, K + 1, generator=generator, dtype=torch.float64)
    path, after = verify.verify(logits, Proposal(tokens, lengths, None, *drawn), sampling, uniforms)
    p = warp(logits, sampling)
    for row in range(B):
        nodes = path[row][path[row] >= 0].tolist()
        assert nodes == list(range(len(nodes))) and len(nodes) <= lengths[row]
        assert 1 <= len(nodes) + 1 <= K + 1
        assert all(p[row, i, tokens[row, i]] > 0 for i in nodes) and p[row, len(nodes), after[row]] > 0
