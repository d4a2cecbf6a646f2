"""Pooled rates and their bootstrap intervals over prompts, and the costs c, v and o of a configuration."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, offset: float = 0.0
) -> list[float] | None:
    """95% interval of offset + sum(numerators) / sum(denominators), resampling prompts 2,000 times; None below two
    prompts.
    """
    if len(numerators) < 2:
        return None
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    draws = np.random.default_rng(seed).integers(0, len(top), (RESAMPLES, len(top)))
    ratios = offset + top[draws].sum(1) / bottom[draws].sum(1)
    return [float(x) for x in np.percentile(ratios, [2.5, 97.5])]


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
    ratios = (t[draws].sum(1) / s[draws].sum(1)) / (pt[draws].sum(1) / ps[draws].sum(1))
    return [float(x) for x in np.percentile(ratios, [2.5, 97.5])]


def ngram_overlap(prompts: Sequence[Sequence[int]], training: Sequence[Sequence[int]], n: int = 13) -> float:
    """Share of prompts that share an n-gram of tokens with the training rows (a prompt shorter than n: the whole
    prompt).
    """
    if not prompts:
        return 0.0
    short = {len(prompt) for prompt in prompts if len(prompt) < n}
    seen = {tuple(row[i : i + size]) for row in training for size in {n, *short} for i in range(len(row) - size + 1)}
    found = 0
    for prompt in prompts:
        size = min(n, len(prompt))
        found += any(tuple(prompt[i : i + size]) in seen for i in range(len(prompt) - size + 1))
    return found / len(prompts)
