"""What one configuration's decoded prompts come to: counts, speeds, intervals, costs, categories, divergences.

The dict's keys are those of a run in report.json, schema 1.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drafttrain.evaluate.divergence import first_divergence
from drafttrain.evaluate.statistics import bootstrap_ratio, bootstrap_speedup
from drafttrain.specdec.clock import quantile
from drafttrain.specdec.decode import Decoded, Generation, Seconds
from drafttrain.specdec.metrics import Counts
from drafttrain.specdec.verify import Synthetic
from drafttrain.target import Target


@dataclass
class Results:
    """What a configuration decoded: one Generation for each prompt and pass, and the batches they ran in."""

    indices: list[int] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    rounds: int = 0
    batches: int = 0
    peak_memory: int | None = None
    adaptive: bool = False
    """A policy carries what it has learned from pass to pass, so that later passes do not repeat the first."""

    def add(self, indices: Sequence[int], done: Decoded, peak_memory: int | None) -> None:
        """A batch; its rows beyond `indices` only filled it up and are dropped."""
        self.indices += indices
        self.generations += done.generations[: len(indices)]
        self.seconds.add(done.seconds)
        self.rounds += done.rounds
        self.batches += 1
        if peak_memory is not None:
            self.peak_memory = max(peak_memory, self.peak_memory or 0)

    @property
    def prompts(self) -> int:
        """Different prompts decoded."""
        return len(set(self.indices))

    @property
    def counts(self) -> Counts:
        """Pooled over the first pass, which later ones repeat token by token; over all of them for a policy."""
        total = Counts()
        for generation in self.generations if self.adaptive else self.generations[: self.prompts]:
            total.add(generation.counts)
        return total

    def tokens(self) -> list[int]:
        """Decoded tokens of each generation: what was delivered after the prefill's token."""
        return [generation.counts.emitted - 1 for generation in self.generations]

    def spent(self) -> list[float]:
        """Decode seconds of each generation, until it ended."""
        return [generation.seconds for generation in self.generations]


def summarise(target: Target, run, plain, prompts: Sequence) -> dict[str, Any]:
    """One entry of report["runs"]. run, plain: the runner's configurations with their Results; prompts: its Prompts."""
    results, counts, candidate = run.results, run.results.counts, run.candidate
    drafted = candidate is not None
    lossy = drafted and candidate.acceptance is not None
    comparable = drafted and run.sampling.greedy and not lossy
    divergences = _divergences(target, results, plain.results, prompts) if comparable else []
    return {
        "id": run.id,
        "label": run.label,
        "draft": candidate.kind if drafted else "none",
        "checkpoint": candidate.checkpoint if drafted else None,
        "trained": drafted and candidate.trained,
        "baseline": plain.id if drafted else None,
        "mode": run.sampling.mode,
        "sampling": {name: getattr(run.sampling, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "k": run.k,
        "tree": candidate.tree.described() if drafted and candidate.tree is not None else None,
        "policy": run.policy.name if run.policy is not None else None,
        "quantization": candidate.quantization if drafted else None,
        "lossy": lossy,
        "synthetic": drafted and isinstance(candidate.acceptance, Synthetic),
        "concurrency": run.concurrency,
        "prompts": results.prompts,
        "iterations": counts.iterations,
        "draft_rounds": counts.draft_rounds,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "emitted_tokens": counts.emitted,
        "draft_lengths": counts.lengths,
        "rounds": results.rounds,
        "acceptance_rate": counts.acceptance_rate,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "per_position_acceptance": counts.per_position_acceptance,
        "conditional_acceptance": counts.conditional_acceptance,
        "intervals": _intervals(results, plain.results, prompts) if drafted else dict.fromkeys(INTERVALS),
        **_speeds(run),
        **costs(results, run.k, plain.results),
        "speedup": speedup(results, plain.results) if drafted else None,
        "seconds": asdict(results.seconds),
        "peak_memory_bytes": results.peak_memory,
        "categories": _categories(run, plain, prompts),
        "identical_to_plain": not divergences if comparable else None,
        "divergences": divergences,
    }


INTERVALS = ("mean_acceptance_length", "speedup")


def speedup(results: Results, plain: Results, chosen: Sequence[int] | None = None) -> float | None:
    """Ratio of pooled decode tokens/s over the chosen generations (None: all); None where the plain output, or this
    one, ended with the prefill's token everywhere.
    """
    places = range(len(results.generations)) if chosen is None else chosen
    figures = (results.tokens(), plain.tokens(), results.spent(), plain.spent())
    tokens, plain_tokens, spent, plain_spent = (sum(values[i] for i in places) for values in figures)
    return (tokens / spent) / (plain_tokens / plain_spent) if tokens and plain_tokens else None


def by_unit(results: Results, prompts: Sequence, chosen: Sequence[int] | None = None) -> tuple[list[float], ...]:
    """(accepted, iterations, tokens, seconds) summed over each unit: the passes and turns of one conversation."""
    places = range(len(results.generations)) if chosen is None else chosen
    units: dict[Any, list[int]] = {}
    for i in places:
        index = results.indices[i]
        units.setdefault(prompts[index].unit or index, []).append(i)
    counts = [generation.counts for generation in results.generations]
    figures = ([c.accepted for c in counts], [c.iterations for c in counts], results.tokens(), results.spent())
    return tuple([sum(values[i] for i in members) for members in units.values()] for values in figures)


def _intervals(
    results: Results, plain: Results, prompts: Sequence, chosen: Sequence[int] | None = None
) -> dict[str, list[float] | None]:
    accepted, iterations, *speed = by_unit(results, prompts, chosen)
    return {
        "mean_acceptance_length": bootstrap_ratio(accepted, iterations, offset=1.0),
        "speedup": bootstrap_speedup(*speed, *by_unit(plain, prompts, chosen)[2:]),
    }


def _speeds(run) -> dict[str, Any]:
    """Each request's own speed; the machine's is `concurrency` times that."""
    results = run.results
    tokens, spent = results.tokens(), results.spent()
    rates = [count / time for count, time in zip(tokens, spent, strict=True) if count]
    pooled = sum(tokens) / sum(spent) if sum(tokens) else None
    prefill = results.seconds.prefill / results.batches
    whole = sum(spent) + prefill * len(spent)
    gaps = [gap for generation in results.generations for gap in generation.gaps]
    return {
        "tokens_per_second": {
            "median": statistics.median(rates) if rates else None,
            "min": min(rates, default=None),
            "max": max(rates, default=None),
            "pooled": pooled,
            "total": None if pooled is None else pooled * run.concurrency,
        },
        "end_to_end_tokens_per_second": sum(generation.counts.emitted for generation in results.generations) / whole,
        "ttft": prefill,
        "itl": {"p50": quantile(gaps, 0.5), "p95": quantile(gaps, 0.95)},
    }


def costs(results: Results, k: int, plain: Results) -> dict[str, Any]:
    """c, v and o of a configuration in plain steps, and ideal_speedup = tau / (1 + K c).

    The plain step is the plain run's whole iteration. c = draft time of an iteration / (K x plain step); v = the
    target's forward / plain step; o = the rest / plain step.
    """
    if not plain.rounds or not results.rounds:
        return {"c": None, "v": None, "o": None, "ideal_speedup": None}
    step, seconds, rounds = plain.seconds.decode / plain.rounds, results.seconds, results.rounds
    c = seconds.draft / rounds / (k * step) if k else None
    return {
        "c": c,
        "v": seconds.verify / rounds / step,
        "o": seconds.rest / rounds / step,
        "ideal_speedup": results.counts.mean_acceptance_length / (1 + k * c) if k else None,
    }


def _categories(run, plain, prompts: Sequence) -> dict[str, Any]:
    results, out = run.results, {}
    for category in sorted({prompt.category for prompt in prompts if prompt.category}):
        chosen = [i for i, index in enumerate(results.indices) if prompts[index].category == category]
        if not chosen:
            continue
        counts = Counts()
        for i in chosen:
            counts.add(results.generations[i].counts)
        out[category] = {
            "prompts": len({results.indices[i] for i in chosen}),
            "mean_acceptance_length": counts.mean_acceptance_length,
            "acceptance_rate": counts.acceptance_rate,
            "speedup": None if run.candidate is None else speedup(results, plain.results, chosen),
            "intervals": dict.fromkeys(INTERVALS)
            if run.candidate is None
            else _intervals(results, plain.results, prompts, chosen),
        }
    return out


def _divergences(target: Target, results: Results, plain: Results, prompts: Sequence) -> list[dict[str, Any]]:
    out = []
    first_pass = zip(results.indices, results.generations, plain.generations, strict=True)
    for index, result, reference in list(first_pass)[: results.prompts]:
        found = first_divergence(target, prompts[index].ids, result.tokens, reference.tokens)
        if found is not None:
            out.append({"prompt": index, **found})
    return out
