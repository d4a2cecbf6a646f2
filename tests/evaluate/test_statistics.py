"""Bootstrap intervals against a second way of drawing them, and the overlap of prompts with training data by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.evaluate.statistics import RESAMPLES, bootstrap_ratio, bootstrap_speedup, ngram_overlap

ACCEPTED, ITERATIONS = [12, 3, 30, 0, 9], [10, 8, 12, 6, 9]
TOKENS, SECONDS = [22, 11, 42, 6, 18], [1.0, 0.9, 1.2, 0.7, 0.9]
PLAIN_SECONDS = [2.2, 1.0, 4.5, 0.6, 1.7]


def resampled(figure, count, seed):
    """2.5 and 97.5 percent points of figure(prompts) over resampled prompts, one resample at a time."""
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count)).tolist()
    values = sorted(figure(draw) for draw in draws)

    def point(share):
        place = share * (len(values) - 1)
        low = int(place)
        return values[low] + (place - low) * (values[low + 1] - values[low])

    return [point(0.025), point(0.975)]


def pooled(values, draw):
    return sum(values[i] for i in draw)


@pytest.mark.parametrize("seed", [0, 7])
def test_intervals_by_a_second_method(seed):
    def tau(draw):
        return 1 + pooled(ACCEPTED, draw) / pooled(ITERATIONS, draw)

    def speedup(draw):
        plain = pooled(TOKENS, draw) / pooled(PLAIN_SECONDS, draw)
        return pooled(TOKENS, draw) / pooled(SECONDS, draw) / plain

    found = bootstrap_ratio(ACCEPTED, ITERATIONS, seed, offset=1.0)
    assert found == pytest.approx(resampled(tau, 5, seed))
    assert found[0] < tau(range(5)) < found[1]
    found = bootstrap_speedup(TOKENS, SECONDS, TOKENS, PLAIN_SECONDS, seed)
    assert found == pytest.approx(resampled(speedup, 5, seed))
    assert found[0] < speedup(range(5)) < found[1]


def test_the_seed_decides():
    assert bootstrap_ratio(ACCEPTED, ITERATIONS, 3) == bootstrap_ratio(ACCEPTED, ITERATIONS, 3)
    assert bootstrap_ratio(ACCEPTED, ITERATIONS, 3) != bootstrap_ratio(ACCEPTED, ITERATIONS, 4)


def test_pairing_cancels_what_both_sides_share():
    """Prompts of very different lengths, each exactly 1.5 times as fast: unpaired resamples would scatter."""
    plain = [1.0, 10.0, 100.0, 3.0]
    found = bootstrap_speedup([5, 50, 500, 15], [s / 1.5 for s in plain], [5, 50, 500, 15], plain)
    assert found == pytest.approx([1.5, 1.5])


def test_below_two_prompts_there_is_no_interval():
    assert bootstrap_ratio([3], [4]) is None and bootstrap_speedup([3], [1.0], [3], [2.0]) is None
    assert bootstrap_ratio([], []) is None


def test_prompts_that_ended_at_once_are_no_reason_for_nan():
    """Resamples made of them alone have no ratio."""
    assert bootstrap_ratio([4, 0], [4, 0]) == [1.0, 1.0]
    assert bootstrap_ratio([0, 0], [0, 0]) is None
    assert bootstrap_speedup([8, 0], [1.0, 1e-6], [8, 0], [2.0, 1e-6]) is not None
    assert bootstrap_speedup([0, 0], [1.0, 1.0], [0, 0], [1.0, 1.0]) is None


def test_overlap_by_hand():
    training = [list(range(100, 120)), [7, 8, 9]]
    thirteen = list(range(105, 118))
    assert len(thirteen) == 13
    prompts = [
        [1, *thirteen, 2],  # 13 tokens in a row of the first row
        [1, *thirteen[:12], 2],  # only 12
        [8, 9],  # a short prompt that stands in the second row as a whole
        [9, 8],
        [*range(113, 120), *range(100, 106)],  # the row's tokens, not in its order
    ]
    assert ngram_overlap(prompts, training) == 2 / 5
    assert ngram_overlap(prompts, training, n=12) == 3 / 5
    assert ngram_overlap(prompts[:1], training) == 1 and ngram_overlap(prompts[3:], training) == 0
    assert ngram_overlap([], training) == 0 and ngram_overlap(prompts, []) == 0


def joined(row):
    return "," + ",".join(map(str, row)) + ","


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=4)


@settings(max_examples=200, deadline=None)
@given(ROWS, ROWS, st.integers(1, 5))
def test_overlap_against_a_search_in_text(prompts, training, n):
    def shares(prompt):
        size = min(n, len(prompt))
        grams = [joined(prompt[i : i + size]) for i in range(len(prompt) - size + 1)]
        return any(gram in joined(row) for gram in grams for row in training)

    expected = sum(map(shares, prompts)) / len(prompts) if prompts else 0
    assert ngram_overlap(prompts, training, n) == expected
