"""Timed runs of every draft against the plain target in one loop, interleaved prompt by prompt, and the report made
of them.
"""

import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from drafttrain.drafts.base import Draft, Proposer
from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate.divergence import first_divergence
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.statistics import bootstrap_ratio, bootstrap_speedup, ngram_overlap
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.decode import Decoded, Seconds, generate
from drafttrain.specdec.metrics import Counts, repeated_ngram_share
from drafttrain.target import Target


@dataclass(frozen=True)
class Candidate:
    """Something that drafts. kind: ngram, eagle3, ..; make: a fresh proposer; ks: the K to run it at, None for all;
    greedy_only: leave it out of sampled decoding when greedy decoding is measured too.
    """

    label: str
    kind: str
    make: Callable[[], Proposer]
    trained: bool = True
    checkpoint: str | None = None
    ks: tuple[int, ...] | None = None
    greedy_only: bool = False


NGRAM = Candidate("n-gram", "ngram", NgramProposer, trained=False)


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the category they are reported under."""

    ids: tuple[int, ...]
    category: str | None = None


@dataclass
class _Run:
    """One configuration and what its runs over the prompts gave, in prompt order."""

    id: str
    candidate: Candidate | None
    k: int
    sampling: Sampling
    proposer: Proposer | None
    results: list[Decoded] = field(default_factory=list)

    @property
    def label(self) -> str:
        return "plain" if self.candidate is None else f"{self.candidate.label} k={self.k}"


def evaluate(
    target: Target,
    drafts: Draft | Mapping[str, Draft] | Sequence[Candidate],
    prompts: Sequence[str | Sequence[int] | Prompt],
    *,
    k: Sequence[int] = (1, 2, 3, 4, 5, 7),
    samplings: Sequence[Sampling] = (Sampling(),),
    max_new_tokens: int = 128,
    ngram: bool = True,
    stop_ids: Sequence[int] | None = None,
    name: str = "prompts",
    training_rows: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """report.json's contents: plain decoding, each draft at each K (and n-gram lookup), for each sampling, on the
    same prompts.

    drafts: one Draft, {label: Draft}, or Candidates. prompts: text, token ids or Prompt. Every prompt runs through all
    configurations before the next one, in an order shuffled anew, because machines drift. Ctrl-C keeps what is done.
    Raises EvaluationError for no prompts, no samplings, K < 1, fewer than 2 new tokens, prompts that leave no room for
    them, or two configurations of one name; and what `generate` raises.
    """
    candidates = _candidates(target, drafts, ngram)
    chosen = [_prompt(prompt, target) for prompt in prompts]
    if not chosen:
        raise EvaluationError("no prompts to evaluate on; expected at least one. Mend: give --prompts or data.test")
    if not k or min(k) < 1:
        raise EvaluationError(f"k is {list(k)}; expected numbers from 1 on (the plain baseline is always run)")
    _check_lengths(target, chosen, max_new_tokens)
    runs = _plan(candidates, sorted(set(k)), samplings)
    options = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    for run in runs:  # Warm-up, not counted: allocations, kernels, caches.
        _decode(target, chosen[0], 0, run, {**options, "max_new_tokens": min(8, max_new_tokens)})
    done = 0
    rng = random.Random(0)
    try:
        for index, prompt in enumerate(chosen):
            results = {}
            for run in rng.sample(runs, len(runs)):
                if progress is not None:
                    progress(done, run.label)
                results[run.id] = _decode(target, prompt, index, run, options)
                done += 1
            for run in runs:
                run.results.append(results[run.id])
        if progress is not None:
            progress(done, "done")
    except KeyboardInterrupt:
        whole = min(len(run.results) for run in runs)
        if not whole:
            raise
        chosen = chosen[:whole]
        for run in runs:
            del run.results[whole:]
    return {
        "schema": 1,
        "target": {"name": target.title, "fingerprint": target.fingerprint},
        "device": _device(target),
        "prompts": {
            "name": name,
            "count": len(chosen),
            "max_new_tokens": max_new_tokens,
            "train_overlap": ngram_overlap([p.ids for p in chosen], training_rows) if training_rows else None,
            "repeated_8gram_share": _repetition(runs),
        },
        "runs": [_summary(target, run, _baseline(runs, run), chosen) for run in runs],
        "certificate": {},
        "provenance": {"command": " ".join(sys.argv), "versions": _versions(), "recipe": dict(recipe or {})},
    }


def _candidates(target: Target, drafts, ngram: bool) -> list[Candidate]:
    if isinstance(drafts, Draft):
        drafts = {drafts.method: drafts}
    if isinstance(drafts, Mapping):
        drafts = [
            Candidate(label, draft.method, lambda draft=draft: draft.proposer(target))
            for label, draft in drafts.items()
        ]
    return [*([NGRAM] if ngram else []), *drafts]


def _prompt(prompt: str | Sequence[int] | Prompt, target: Target) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str) and target.tokenizer is None:
        raise EvaluationError(f"{target.name} has no tokenizer for prompts of text. Mend: give token ids")
    ids = target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    return Prompt(tuple(ids))


def _check_lengths(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Before hours are spent: there is something to time, and room for it behind every prompt."""
    if max_new_tokens < 2:
        raise EvaluationError(
            f"max_new_tokens is {max_new_tokens}; expected at least 2: the prefill yields the first token, and only "
            "what follows is timed"
        )
    room = target.max_positions - max_new_tokens + 1  # The last token is never run.
    long = [index for index, prompt in enumerate(prompts) if len(prompt.ids) > room]
    if long:
        raise EvaluationError(
            f"prompt {long[0]} has {len(prompts[long[0]].ids)} tokens; expected at most {room}, which leaves room for "
            f"{max_new_tokens} new ones in {target.name}'s {target.max_positions} positions. "
            "Mend: shorten it or lower max_new_tokens"
        )


def configurations(
    candidates: Sequence[Candidate], ks: Sequence[int], samplings: Sequence[Sampling]
) -> list[tuple[Candidate | None, int, Sampling]]:
    """What `evaluate` runs on every prompt: for each sampling plain decoding (None, 0), then each candidate at each
    K.
    """
    any_greedy = any(sampling.greedy for sampling in samplings)
    out: list[tuple[Candidate | None, int, Sampling]] = []
    for sampling in samplings:
        out.append((None, 0, sampling))
        for candidate in candidates:
            if sampling.greedy or not (candidate.greedy_only and any_greedy):
                out += [(candidate, k, sampling) for k in candidate.ks or ks]
    return out


def _plan(candidates: Sequence[Candidate], ks: Sequence[int], samplings: Sequence[Sampling]) -> list[_Run]:
    runs = []
    for candidate, k, sampling in configurations(candidates, ks, samplings):
        name = "plain" if candidate is None else f"{candidate.label.replace(' ', '-')}-k{k}"
        proposer = None if candidate is None else candidate.make()
        runs.append(_Run(f"{name}{_suffix(sampling)}", candidate, k, sampling, proposer))
    ids = [run.id for run in runs]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice or not runs:
        raise EvaluationError(
            f"several configurations are named {', '.join(twice)}. Mend: give every draft a label and every sampling "
            "settings of its own"
            if runs
            else "no samplings to evaluate with; expected at least one. Mend: samplings=[Sampling()]"
        )
    return runs


def _suffix(sampling: Sampling) -> str:
    """What tells the runs of one sampling from another's: empty for greedy decoding."""
    if sampling.greedy:
        return ""
    top_p = f"-p{sampling.top_p:g}" if sampling.top_p < 1 else ""
    top_k = f"-top{sampling.top_k}" if sampling.top_k else ""
    return f"-t{sampling.temperature:g}{top_p}{top_k}-{sampling.mode.replace('_', '-')}"


def _decode(target: Target, prompt: Prompt, index: int, run: _Run, options: dict) -> Decoded:
    return generate(
        target, [prompt.ids], run.proposer, k=max(run.k, 1), sampling=run.sampling, requests=[index], **options
    )


def _baseline(runs: Sequence[_Run], run: _Run) -> _Run:
    return next(other for other in runs if other.candidate is None and other.sampling == run.sampling)


def _summary(target: Target, run: _Run, plain: _Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    counts, seconds = pool(run.results)
    candidate = run.candidate
    tokens, spent = _tokens(run), [result.seconds.decode for result in run.results]
    plain_spent = [result.seconds.decode for result in plain.results]
    divergences = [] if candidate is None or not run.sampling.greedy else _divergences(target, run, plain, prompts)
    return {
        "id": run.id,
        "label": run.label,
        "draft": "none" if candidate is None else candidate.kind,
        "checkpoint": None if candidate is None else candidate.checkpoint,
        "trained": candidate is not None and candidate.trained,
        "baseline": None if candidate is None else plain.id,
        "mode": run.sampling.mode,
        "sampling": {name: getattr(run.sampling, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "k": run.k,
        "tree": None,
        "policy": None,
        "concurrency": 1,
        "iterations": counts.iterations,
        "draft_rounds": counts.draft_rounds,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "emitted_tokens": counts.emitted,
        "acceptance_rate": counts.acceptance_rate,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "per_position_acceptance": counts.per_position_acceptance,
        "conditional_acceptance": counts.conditional_acceptance,
        "intervals": _intervals(run, plain, tokens, spent, plain_spent),
        **_speeds(run, counts, seconds, tokens, spent),
        **costs(counts, seconds, run.k, *pool(plain.results)),
        "speedup": None if candidate is None else _speedup(tokens, spent, _tokens(plain), plain_spent),
        "seconds": asdict(seconds),
        "categories": _categories(run, plain, prompts),
        "identical_to_plain": None if candidate is None or not run.sampling.greedy else not divergences,
        "divergences": divergences,
    }


def pool(results: Sequence[Decoded]) -> tuple[Counts, Seconds]:
    """Counts and seconds summed over decoded batches."""
    counts, seconds = Counts(), Seconds()
    for result in results:
        counts.add(result.counts)
        seconds.add(result.seconds)
    return counts, seconds


def _tokens(run: _Run) -> list[int]:
    """Decoded tokens of each prompt: what was delivered after the prefill's token."""
    return [result.counts.emitted - 1 for result in run.results]


def _speedup(tokens, spent, plain_tokens, plain_spent) -> float | None:
    """Ratio of pooled decode tokens/s; None where every output ended with the prefill's token."""
    return (sum(tokens) / sum(spent)) / (sum(plain_tokens) / sum(plain_spent)) if sum(plain_tokens) else None


def _intervals(run: _Run, plain: _Run, tokens, spent, plain_spent) -> dict[str, list[float] | None]:
    if run.candidate is None:
        return {"mean_acceptance_length": None, "speedup": None}
    each = [result.counts for result in run.results]
    return {
        "mean_acceptance_length": bootstrap_ratio([c.accepted for c in each], [c.iterations for c in each], offset=1.0),
        "speedup": bootstrap_speedup(tokens, spent, _tokens(plain), plain_spent),
    }


def _speeds(run: _Run, counts: Counts, seconds: Seconds, tokens, spent) -> dict[str, Any]:
    rates = [count / time for count, time in zip(tokens, spent, strict=True) if count]
    whole = seconds.prefill + seconds.decode
    return {
        "tokens_per_second": {
            "median": statistics.median(rates) if rates else None,
            "min": min(rates, default=None),
            "max": max(rates, default=None),
            "pooled": sum(tokens) / sum(spent),
        },
        "end_to_end_tokens_per_second": counts.emitted / whole,
        "ttft": seconds.prefill / len(run.results),
    }


def costs(counts: Counts, seconds: Seconds, k: int, plain_counts: Counts, plain_seconds: Seconds) -> dict[str, Any]:
    """c, v and o of a configuration in plain steps, and ideal_speedup = tau / (1 + K c).

    The plain step is the plain run's whole iteration. c = draft time of an iteration / (K x plain step); v = the
    target's forward / plain step; o = the rest / plain step.
    """
    if not plain_counts.iterations or not counts.iterations:
        return {"c": None, "v": None, "o": None, "ideal_speedup": None}
    step = plain_seconds.decode / plain_counts.iterations
    c = seconds.draft / counts.iterations / (k * step) if k else None
    return {
        "c": c,
        "v": seconds.verify / counts.iterations / step,
        "o": seconds.rest / counts.iterations / step,
        "ideal_speedup": counts.mean_acceptance_length / (1 + k * c) if k else None,
    }


def _categories(run: _Run, plain: _Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for category in sorted({prompt.category for prompt in prompts if prompt.category}):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.category == category]
        counts, seconds = pool([run.results[i] for i in chosen])
        plain_counts, plain_seconds = pool([plain.results[i] for i in chosen])
        plain_tokens, plain_spent = [plain_counts.emitted - len(chosen)], [plain_seconds.decode]
        speedup = _speedup([counts.emitted - len(chosen)], [seconds.decode], plain_tokens, plain_spent)
        out[category] = {
            "prompts": len(chosen),
            "mean_acceptance_length": counts.mean_acceptance_length,
            "acceptance_rate": counts.acceptance_rate,
            "speedup": None if run.candidate is None else speedup,
        }
    return out


def _divergences(target: Target, run: _Run, plain: _Run, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    out = []
    for index, (prompt, result, reference) in enumerate(zip(prompts, run.results, plain.results, strict=True)):
        found = first_divergence(target, prompt.ids, result.generations[0].tokens, reference.generations[0].tokens)
        if found is not None:
            out.append({"prompt": index, **found})
    return out


def _repetition(runs: Sequence[_Run]) -> float | None:
    """Share of repeated 8-grams in the plain outputs: of greedy decoding, or of the first sampling when none is
    greedy.
    """
    plain = [run for run in runs if run.candidate is None]
    run = next((run for run in plain if run.sampling.greedy), plain[0])
    return repeated_ngram_share([result.generations[0].tokens for result in run.results])


def _device(target: Target) -> dict[str, Any]:
    cuda = target.device.type == "cuda"
    name = torch.cuda.get_device_name(target.device) if cuda else "CPU"
    return {"name": name, "dtype": str(target.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("drafttrain", "torch", "transformers", "accelerate", "safetensors")}
