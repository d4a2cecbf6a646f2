"""What serving engines measure, in this toolkit's names and counting: counts of drafts, answers, and report.json.

An engine counts rounds in which something was drafted (vLLM's num_drafts, SGLang's verify calls), so here
tau = 1 + accepted / draft_rounds and per-position acceptance is a share of draft_rounds.
"""

import statistics as stdlib_statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from drafttrain.evaluate.report import command_line
from drafttrain.evaluate.statistics import bootstrap_ratio, bootstrap_speedup, ngram_overlap
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.metrics import repeated_ngram_share


@dataclass(frozen=True)
class EnginePrompt:
    """What an engine is asked to continue: text (the engine tokenizes it) or token ids; its category; and its unit:
    prompts of one unit are resampled together for the intervals, None alone."""

    content: str | tuple[int, ...]
    category: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class EngineCounts:
    """draft_rounds, drafted, accepted; reached[i]: rounds in which the first i + 1 drafts were all accepted.

    iterations: target forwards after the prefill, also with nothing drafted. None: the engine does not say.
    """

    draft_rounds: int
    drafted: int | None
    accepted: int
    reached: tuple[int, ...] | None
    iterations: int | None = None

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], drafted: int, k: int) -> "EngineCounts":
        """From the number of rounds that accepted exactly 0, 1, 2, .. drafts (vLLM's and SGLang's per-request form)."""
        padded = [*histogram, *[0] * (k + 1 - len(histogram))]
        reached = tuple(sum(padded[i + 1 :]) for i in range(len(padded) - 1))
        return cls(sum(padded), drafted, sum(j * count for j, count in enumerate(padded)), reached)

    @classmethod
    def pool(cls, counts: Sequence["EngineCounts"]) -> "EngineCounts":
        """Sums; a figure that one of them lacks is None."""
        reached = None
        if all(one.reached is not None for one in counts):
            longest = max((len(one.reached) for one in counts), default=0)
            reached = tuple(sum(one.reached[i] for one in counts if i < len(one.reached)) for i in range(longest))
        rounds, accepted = sum(one.draft_rounds for one in counts), sum(one.accepted for one in counts)
        drafted, iterations = (_sum([getattr(one, name) for one in counts]) for name in ("drafted", "iterations"))
        return cls(rounds, drafted, accepted, reached, iterations)

    @property
    def mean_acceptance_length(self) -> float:
        """tau = 1 + accepted / draft_rounds; 1 when nothing was drafted."""
        return 1 + self.accepted / self.draft_rounds if self.draft_rounds else 1.0

    @property
    def per_position_acceptance(self) -> list[float] | None:
        """reached / draft_rounds: joint, it never rises."""
        if self.reached is None or not self.draft_rounds:
            return None
        return [count / self.draft_rounds for count in self.reached]


def _sum(values: Sequence[int | None]) -> int | None:
    return None if any(value is None for value in values) else sum(values)


def iterations_of(steps: int | None, emitted: int, accepted: int, k: int) -> int | None:
    """Iterations of one request from the engine's steps, the prefill being one of them.

    None where the sum does not come out: every iteration yields its accepted drafts and one token more, and only the
    last may be cut, by at most k (a prefill in chunks, or another client's steps, break it).
    """
    if steps is None:
        return None
    iterations = steps - 1
    return iterations if 0 <= iterations + accepted - (emitted - 1) <= k else None


@dataclass(frozen=True)
class Answer:
    """One prompt's result. tokens None where the engine tells none; text None where it was not detokenized.

    runs: tokens of each delivery, the prefill's first; gaps: seconds between deliveries (empty: not measured);
    ttft: seconds until the first token; seconds: from the first to the last token.
    """

    tokens: tuple[int, ...] | None
    text: str | None
    emitted: int
    ttft: float
    seconds: float
    runs: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    counts: EngineCounts | None = None

    @property
    def decoded(self) -> int:
        """Tokens that came in `seconds`: all but those of the first delivery."""
        return self.emitted - (self.runs[0] if self.runs else 1)


@dataclass(frozen=True)
class Group:
    """Prompts that ran together: their answers, and the counts over all of them where single answers have none."""

    answers: tuple[Answer, ...]
    counts: EngineCounts | None = None


@dataclass
class EngineRun:
    """One configuration and its groups in prompt order; draft "none" is plain decoding."""

    id: str
    label: str
    draft: str
    k: int
    checkpoint: str | None = None
    tree: dict[str, Any] | None = None
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        return self.draft == "none"

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group.answers]

    def counts(self, chosen: Sequence[int] | None = None) -> EngineCounts | None:
        """Pooled over the answers (of the chosen prompts); None where the engine does not say."""
        every = self.answers
        answers = every if chosen is None else [every[i] for i in chosen]
        if all(answer.counts is not None for answer in answers):
            return EngineCounts.pool([answer.counts for answer in answers])
        pooled = [group.counts for group in self.groups]
        return EngineCounts.pool(pooled) if chosen is None and None not in pooled else None


def engine_report(
    runs: Sequence[EngineRun],
    prompts: Sequence[EnginePrompt],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    concurrency: int,
    target: Mapping[str, Any],
    device: Mapping[str, Any],
    engine: Mapping[str, Any],
    name: str = "prompts",
    plain_tokens: Sequence[Sequence[int]] | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    notes: Sequence[str] = (),
    interruption: str | None = None,
) -> dict[str, Any]:
    """report.json's contents. Every run answered the same prompts, the first ones of `prompts`; runs with draft "none"
    are the baseline of the others. plain_tokens: our own plain outputs, to be compared with (key "against_ours").
    """
    count = len(runs[0].answers)
    assert all(len(run.answers) == count for run in runs)
    requested, prompts = len(prompts), prompts[:count]
    plain = next((run for run in runs if run.plain), None)
    ids = [list(prompt.content) for prompt in prompts if not isinstance(prompt.content, str)]
    texts = [answer.tokens for answer in (plain or runs[0]).answers]
    return {
        "schema": 1,
        "target": dict(target),
        "device": dict(device),
        "engine": dict(engine),
        "prompts": {
            "name": name,
            "count": count,
            "requested": requested,
            "max_new_tokens": max_new_tokens,
            "train_overlap": ngram_overlap(ids, training_rows) if training_rows and len(ids) == count else None,
            "repeated_8gram_share": repeated_ngram_share(texts) if all(text is not None for text in texts) else None,
        },
        "runs": [_summary(run, plain, prompts, sampling, concurrency, plain_tokens) for run in runs],
        "certificate": {},
        "notes": [*notes, *([] if plain else ["no plain run of the engine: no speedup"])],
        "interrupted": interruption is not None,
        "interruption": interruption,
        "provenance": {
            "command": command_line(sys.argv),
            "versions": {"drafttrain": version("drafttrain"), str(engine["name"]): engine.get("version")},
            "recipe": {},
        },
    }


def _summary(run: EngineRun, plain: EngineRun | None, prompts, sampling: Sampling, concurrency: int, ours):
    counts = run.counts()
    baseline = None if run.plain else plain
    answers = run.answers
    rates = [a.decoded / a.seconds for a in answers if a.decoded and a.seconds]
    pooled = _rate(answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    compared = baseline is not None and sampling.greedy
    divergences = _divergences(answers, [(a.tokens, a.text) for a in baseline.answers]) if compared else []
    emitted = sum(answer.emitted for answer in answers)
    return {
        "id": run.id,
        "label": run.label,
        "draft": run.draft,
        "checkpoint": run.checkpoint,
        "trained": run.draft not in ("none", "ngram", "suffix"),
        "baseline": None if baseline is None else baseline.id,
        "mode": sampling.mode,
        "sampling": {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "k": run.k,
        "tree": run.tree,
        **{
            "policy": None,
            "quantization": None,
            "lossy": False,
            "synthetic": False,
            "draft_lengths": [],
            "rounds": None,
        },
        "concurrency": concurrency,
        "prompts": len(answers),
        "emitted_tokens": emitted,
        **_acceptance(counts, run.tree),
        "denominator": "draft_rounds",
        "intervals": _intervals(run, baseline, prompts),
        "tokens_per_second": {
            "median": stdlib_statistics.median(rates) if rates else None,
            "min": min(rates, default=None),
            "max": max(rates, default=None),
            "pooled": pooled,
            "total": None if pooled is None else pooled * concurrency,
        },
        "end_to_end_tokens_per_second": emitted / sum(answer.ttft + answer.seconds for answer in answers),
        "ttft": stdlib_statistics.mean(answer.ttft for answer in answers),
        "itl": {f"p{p}": float(np.percentile(gaps, p)) if gaps else None for p in (50, 95)},
        "speedup": None if baseline is None else _speedup(answers, baseline.answers),
        **dict.fromkeys(("ideal_speedup", "c", "v", "o", "peak_memory_bytes")),
        "seconds": {
            "prefill": sum(answer.ttft for answer in answers),
            "decode": sum(answer.seconds for answer in answers),
            **dict.fromkeys(("draft", "verify", "rest")),
        },
        "categories": _categories(run, baseline, prompts),
        "identical_to_plain": not divergences if compared else None,
        "divergences": divergences,
        "against_ours": _against(answers, ours) if ours is not None and sampling.greedy else None,
        "per_prompt": _per_prompt(answers),
        "notes": run.notes,
    }


def _per_prompt(answers: Sequence[Answer]) -> dict[str, list]:
    """What paired comparisons with other evaluations of the same prompts are made of; counts None where not told."""
    counts = [answer.counts for answer in answers]
    return {
        **{
            name: [None if one is None else getattr(one, name) for one in counts]
            for name in ("draft_rounds", "accepted", "reached")
        },
        "tokens": [answer.tokens for answer in answers],
        "decoded": [answer.decoded for answer in answers],
        "seconds": [answer.seconds for answer in answers],
    }


def _acceptance(counts: EngineCounts | None, tree: Mapping[str, Any] | None) -> dict[str, Any]:
    names = ("iterations", "draft_rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate")
    if counts is None:
        lists = {"per_position_acceptance": None, "conditional_acceptance": None}
        return {**dict.fromkeys(names), "mean_acceptance_length": None, **lists}
    rates = counts.per_position_acceptance
    rate = counts.accepted / counts.drafted if counts.drafted and tree is None else None
    before = [1.0, *(rates or [])]
    return {
        **dict(
            zip(names, (counts.iterations, counts.draft_rounds, counts.drafted, counts.accepted, rate), strict=True)
        ),
        "mean_acceptance_length": counts.mean_acceptance_length,
        "per_position_acceptance": [] if rates is None and not counts.draft_rounds else rates,
        "conditional_acceptance": [
            joint / previous if previous else None for joint, previous in zip(rates or [], before, strict=False)
        ],
    }


def _rate(answers: Sequence[Answer]) -> float | None:
    """Pooled decode tokens/s of one request; the machine's is `concurrency` times that."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.decoded for answer in answers) / seconds if seconds else None


def _speedup(answers: Sequence[Answer], plain: Sequence[Answer]) -> float | None:
    ours, theirs = _rate(answers), _rate(plain)
    return ours / theirs if ours and theirs else None


def _intervals(run: EngineRun, baseline: EngineRun | None, prompts: Sequence[EnginePrompt], chosen=None):
    """95% intervals over units of prompts; None where single prompts have no counts, and without a baseline."""
    units: dict[Any, list[int]] = {}
    for i in range(len(prompts)) if chosen is None else chosen:
        units.setdefault(prompts[i].unit or i, []).append(i)
    answers, plain = run.answers, [] if baseline is None else baseline.answers

    def sums(side: Sequence[Answer], value: Callable[[Answer], float]) -> list[float]:
        return [sum(value(side[i]) for i in members) for members in units.values()]

    out: dict[str, Any] = {"mean_acceptance_length": None, "speedup": None}
    if not run.plain and all(answers[i].counts is not None for members in units.values() for i in members):
        accepted, rounds = sums(answers, lambda a: a.counts.accepted), sums(answers, lambda a: a.counts.draft_rounds)
        out["mean_acceptance_length"] = bootstrap_ratio(accepted, rounds, offset=1.0)
    if baseline is not None:
        columns = [sums(side, get) for side in (answers, plain) for get in (lambda a: a.decoded, lambda a: a.seconds)]
        out["speedup"] = bootstrap_speedup(*columns)
    return out


def _categories(run: EngineRun, baseline: EngineRun | None, prompts: Sequence[EnginePrompt]) -> dict[str, Any]:
    out = {}
    for category in sorted({prompt.category for prompt in prompts if prompt.category}):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.category == category]
        acceptance = _acceptance(run.counts(chosen), run.tree)
        mine, plain = ([one.answers[i] for i in chosen] if one else [] for one in (run, baseline))
        out[category] = {
            "prompts": len(chosen),
            **{name: acceptance[name] for name in ("mean_acceptance_length", "acceptance_rate")},
            "speedup": _speedup(mine, plain) if plain else None,
            "intervals": _intervals(run, baseline, prompts, chosen),
        }
    return out


def _divergences(answers: Sequence[Answer], others: Sequence[tuple]) -> list[dict[str, Any]]:
    """The first difference of each answer from (tokens, text): by token where both tell tokens, else by character."""
    out = []
    for index, (answer, (tokens, text)) in enumerate(zip(answers, others, strict=True)):
        by_token = answer.tokens is not None and tokens is not None
        mine, theirs = (answer.tokens, tokens) if by_token else (answer.text or "", text or "")
        position = first_difference(mine, theirs)
        if position is None:
            continue
        pair = [side[position] if position < len(side) else None for side in (mine, theirs)]
        out.append(
            {
                "prompt": index,
                "position": position,
                "token": pair[0],
                "plain_token": pair[1],
                "margin": None,
                "ulps": None,
                "unit": "token" if by_token else "character",
            }
        )
    return out


def first_difference(left: Sequence, right: Sequence) -> int | None:
    """Where two sequences first differ (the shorter one's end included); None where they are equal."""
    shared = min(len(left), len(right))
    position = next((i for i in range(shared) if left[i] != right[i]), shared)
    return None if position == len(left) == len(right) else position


def _against(answers: Sequence[Answer], ours: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Agreement with our own plain outputs; None where the engine tells no token ids."""
    if any(answer.tokens is None for answer in answers):
        return None
    found = _divergences(answers, [(tuple(tokens), None) for tokens in ours[: len(answers)]])
    return {"compared": len(answers), "identical": len(answers) - len(found), "divergences": found}
