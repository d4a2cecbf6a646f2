"""Counts by hand: pooled rates, tau = 1 + sum of per-position rates, expected tokens of i.i.d. acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.specdec.metrics import Counts, repeated_ngram_share


def counts_of(*rounds: tuple[int, int]) -> Counts:
    counts = Counts()
    for drafted, accepted in rounds:
        counts.add_round(drafted, accepted)
    return counts


def test_two_iterations_by_hand():
    counts = counts_of((3, 2), (3, 3))
    assert counts.acceptance_rate == pytest.approx(5 / 6)
    assert counts.mean_acceptance_length == 3.5
    assert counts.per_position_acceptance == [1, 1, 0.5]
    assert counts.conditional_acceptance == [1, 1, 0.5]
    assert counts.iterations == counts.draft_rounds == 2


def test_rounds_without_drafts_count_as_iterations_but_not_as_draft_rounds():
    counts = counts_of((0, 0), (2, 1), (0, 0), (2, 2))
    assert (counts.iterations, counts.draft_rounds, counts.drafted, counts.accepted) == (4, 2, 4, 3)
    assert counts.mean_acceptance_length == 1.75
    assert counts.per_position_acceptance == [0.5, 0.25]


def test_nothing_drafted():
    assert counts_of((0, 0)).acceptance_rate is None
    assert counts_of((0, 0)).per_position_acceptance == []
    assert Counts().mean_acceptance_length == 1
    assert counts_of((2, 0)).conditional_acceptance == [0, None]


def test_pooling_is_not_the_mean_of_requests():
    long, short = counts_of(*[(2, 2)] * 9), counts_of((2, 0))
    assert Counts().add(long).add(short).mean_acceptance_length == pytest.approx(2.8)
    assert (long.mean_acceptance_length + short.mean_acceptance_length) / 2 == 2


# Of 10**K rounds with i.i.d. acceptance a, exactly 10**K a**j (1 - a) accept j drafts, and 10**K a**K all K.
@pytest.mark.parametrize(("tenths", "K", "tokens"), [(8, 5, 3.68928), (6, 3, 2.176), (5, 2, 1.75)])
def test_expected_tokens_of_independent_acceptance(tenths, K, tokens):
    counts = Counts()
    for accepted in range(K + 1):
        share = tenths**accepted * 10 ** (K - accepted)
        if accepted < K:
            share = share * (10 - tenths) // 10
        for _ in range(share):
            counts.add_round(K, accepted)
    a = tenths / 10
    assert counts.mean_acceptance_length == pytest.approx(tokens, rel=1e-12)
    assert counts.mean_acceptance_length == pytest.approx((1 - a ** (K + 1)) / (1 - a))
    assert counts.conditional_acceptance == pytest.approx([a] * K)


rounds = st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=12)


@given(rounds, rounds)
def test_tau_is_one_plus_the_per_position_rates_and_pooling_concatenates(first, second):
    counts = counts_of(*first, *second)
    assert counts.mean_acceptance_length == pytest.approx(1 + sum(counts.per_position_acceptance))
    assert counts.per_position_acceptance == sorted(counts.per_position_acceptance, reverse=True)
    assert len(counts.reached) == max([d for d, _ in [*first, *second]], default=0)
    assert counts_of(*first).add(counts_of(*second)) == counts


def test_repeated_share_by_hand():
    assert repeated_ngram_share([[1, 2, 1, 2, 1]], n=2) == 0.5  # 12, 21, then both again
    assert repeated_ngram_share([[1, 2], [1, 2]], n=2) == 0  # never across sequences
    assert repeated_ngram_share([[1, 2, 3]], n=8) == 0
    assert repeated_ngram_share([[7] * 10, [1, 2, 3, 4, 5, 6, 7, 8]], n=8) == 0.5
