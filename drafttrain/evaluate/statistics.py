"""Bootstrap intervals over prompts of pooled rates and their differences; prompts that overlap with training data."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, offset: float = 0.0
) -> list[float] | None:
    """95% interval of offset + sum(numerators) / sum(denominators), resampling prompts 2,000 times; None below two
    prompts. Resamples whose ratio is not defined are left out; None when all are.
    """
    if len(numerators) < 2:
        return None
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    draws = np.random.default_rng(seed).integers(0, len(top), (RESAMPLES, len(top)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(offset + top[draws].sum(1) / bottom[draws].sum(1))


def bootstrap_speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    plain_tokens: Sequence[float],
    plain_seconds: Sequence[float],
    seed=0,
) -> list[float] | None:
    """95% interval of the ratio of pooled tokens/s, paired: both sides see the same resampled prompts."""
    if len(tokens) < 2:
        return None
    t, s, pt, ps = (np.asarray(x, float) for x in (tokens, seconds, plain_tokens, plain_seconds))
    draws = np.random.default_rng(seed).integers(0, len(t), (RESAMPLES, len(t)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval((t[draws].sum(1) / s[draws].sum(1)) / (pt[draws].sum(1) / ps[draws].sum(1)))


def bootstrap_difference(
    accepted: Sequence[float],
    iterations: Sequence[float],
    other_accepted: Sequence[float],
    other_iterations: Sequence[float],
    seed=0,
) -> list[float] | None:
    """95% interval of one pooled ratio less another, paired: both sides see the same resampled prompts. None below two
    prompts."""
    if len(accepted) < 2:
        return None
    a, i, b, j = (np.asarray(x, float) for x in (accepted, iterations, other_accepted, other_iterations))
    draws = np.random.default_rng(seed).integers(0, len(a), (RESAMPLES, len(a)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(a[draws].sum(1) / i[draws].sum(1) - b[draws].sum(1) / j[draws].sum(1))


def _interval(ratios: np.ndarray) -> list[float] | None:
    defined = ratios[np.isfinite(ratios)]
    return [float(x) for x in np.percentile(defined, [2.5, 97.5])] if len(defined) else None


def ngram_overlap(prompts: Sequence[Sequence[int]], training: Sequence[Sequence[int]], n: int = 13) -> float:
    """Share of prompts that share an n-gram of tokens with the training rows (a prompt shorter than n: the whole
    prompt).
    """
    if not prompts:
        return 0.0
    # The prompts' n-grams are kept, not the training data's: those would fill the memory.
    owners: dict[tuple[int, ...], set[int]] = {}
    for number, prompt in enumerate(prompts):
        size = min(n, len(prompt))
        for i in range(len(prompt) - size + 1):
            owners.setdefault(tuple(prompt[i : i + size]), set()).add(number)
    sizes = {len(gram) for gram in owners}
    found: set[int] = set()
    for row in training:
        for size in sizes:
            for i in range(len(row) - size + 1):
                found |= owners.get(tuple(row[i : i + size]), set())
    return len(found) / len(prompts)
