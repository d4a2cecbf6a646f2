"""Paired differences between drafts that ran on the same prompts: tau and speed, each with a 95% interval."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from drafttrain.evaluate.statistics import bootstrap_difference, bootstrap_speedup
from drafttrain.evaluate.summary import by_unit


def comparisons(runs: Sequence, prompts: Sequence) -> list[dict[str, Any]]:
    """For every two drafted configurations of equal K, sampling and concurrency: a against b.

    {"a", "b": run ids, "labels": [..], "tau_difference": {"value", "interval"}, "speedup_ratio": {..}}: tau of a less
    tau of b, and tokens/s of a over tokens/s of b; both resample the same prompts on both sides.
    """
    drafted = [run for run in runs if run.candidate is not None]
    return [
        _pair(a, b, prompts)
        for a, b in combinations(drafted, 2)
        if (a.k, a.sampling, a.concurrency) == (b.k, b.sampling, b.concurrency)
    ]


def _pair(a, b, prompts: Sequence) -> dict[str, Any]:
    sides = [by_unit(run.results, prompts) for run in (a, b)]
    accepted, iterations, tokens, spent = zip(*sides, strict=True)
    taus = [sum(accepted[i]) / sum(iterations[i]) if sum(iterations[i]) else 0.0 for i in (0, 1)]
    speeds = [sum(tokens[i]) / sum(spent[i]) if sum(spent[i]) else 0.0 for i in (0, 1)]
    return {
        "a": a.id,
        "b": b.id,
        "labels": [a.label, b.label],
        "tau_difference": {
            "value": taus[0] - taus[1],
            "interval": bootstrap_difference(accepted[0], iterations[0], accepted[1], iterations[1]),
        },
        "speedup_ratio": {
            "value": speeds[0] / speeds[1] if speeds[1] else None,
            "interval": bootstrap_speedup(tokens[0], spent[0], tokens[1], spent[1]),
        },
    }
