"""Timed runs of every draft against the plain target in one loop, interleaved prompt by prompt, and the report made
of them.
"""

import random
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from drafttrain.drafts.base import Draft, Proposer
from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate.compare import comparisons
from drafttrain.evaluate.cost import break_even
from drafttrain.evaluate.report import EvaluationError, command_line
from drafttrain.evaluate.statistics import ngram_overlap
from drafttrain.evaluate.summary import Results, summarise
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, Tree
from drafttrain.specdec.certificate import certificate as certify
from drafttrain.specdec.certificate import record_logits
from drafttrain.specdec.decode import Decoded, generate
from drafttrain.specdec.graphs import capture_note
from drafttrain.specdec.metrics import repeated_ngram_share
from drafttrain.specdec.policy import Policy
from drafttrain.specdec.verify import Synthetic, Typical
from drafttrain.target import Target


@dataclass(frozen=True)
class Candidate:
    """Something that drafts. kind: ngram, eagle3, ..; make: a fresh proposer; ks: the K to run it at, None for all;
    greedy_only: leave it out of sampled decoding when greedy decoding is measured too; tree: what its proposer drafts,
    None for chains; policy: makes a fresh policy for a run, given its concurrency; acceptance: a lossy rule, None for
    the exact one; quantization: int8 or int4, None for weights as stored.
    """

    label: str
    kind: str
    make: Callable[[], Proposer]
    trained: bool = True
    checkpoint: str | None = None
    ks: tuple[int, ...] | None = None
    greedy_only: bool = False
    tree: Tree | None = None
    policy: Callable[[int], Policy] | None = None
    acceptance: Typical | Synthetic | None = None
    quantization: str | None = None


NGRAM = Candidate("n-gram", "ngram", NgramProposer, trained=False)


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the category they are reported under. unit: prompts of one unit (the turns of a
    conversation, say) are resampled together for the intervals; None: each alone.
    """

    ids: tuple[int, ...]
    category: str | None = None
    unit: str | None = None


@dataclass
class _Run:
    """One configuration and what its runs over the prompts gave, in prompt order, pass after pass."""

    id: str
    candidate: Candidate | None
    k: int
    sampling: Sampling
    concurrency: int
    proposer: Proposer | None
    policy: Policy | None
    results: Results = field(default_factory=Results)

    @property
    def label(self) -> str:
        if self.candidate is None:
            return "plain"
        extra = [str(self.candidate.tree)] if self.candidate.tree else []
        extra += [self.policy.name] if self.policy else []
        extra += [type(self.candidate.acceptance).__name__.lower()] if self.candidate.acceptance else []
        return " ".join([self.candidate.label, *extra, f"k={self.k}"])


def evaluate(
    target: Target,
    drafts: Draft | Mapping[str, Draft] | Sequence[Candidate],
    prompts: Sequence[str | Sequence[int] | Prompt],
    *,
    k: Sequence[int] = (1, 2, 3, 4, 5, 7),
    samplings: Sequence[Sampling] = (Sampling(),),
    concurrency: Sequence[int] = (1,),
    repeats: int = 1,
    max_new_tokens: int = 128,
    ngram: bool = True,
    stop_ids: Sequence[int] | None = None,
    certificate: bool = True,
    capture: bool | None = None,
    name: str = "prompts",
    training_rows: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    compare: bool = False,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """report.json's contents: plain decoding, each draft at each K (and n-gram lookup), for each sampling and number of
    requests at a time, on the same prompts.

    drafts: one Draft, {label: Draft}, or Candidates. prompts: text, token ids or Prompt. Every group of `concurrency`
    prompts runs through all configurations before the next one, in an order shuffled anew, because machines drift; a
    request that has ended keeps its place in the batch, uncounted, so that all iterations are equally wide. repeats:
    passes over the prompts. capture: as in generate. compare: adds paired differences (evaluate/compare.py). Ctrl-C
    keeps what is done. Raises EvaluationError for no prompts, no samplings, K < 1 or beyond what a draft allows, fewer
    than 2 new tokens, prompts that are empty or leave no room for them, or two configurations of one name; and what
    `generate` raises.
    """
    candidates = _candidates(target, drafts, ngram)
    chosen = [_prompt(prompt, target) for prompt in prompts]
    _check_numbers(k, concurrency, repeats)
    _check_prompts(target, chosen, max_new_tokens)
    runs = _plan(candidates, sorted(set(k)), samplings, sorted(set(concurrency)))
    options = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "capture": capture}
    measured = _Measurement(target, chosen, runs, options, progress)
    interrupted = measured.run(repeats)
    left_out = sorted({run.label for run in runs if not run.results.generations})
    runs = [run for run in runs if run.results.generations]
    prompts_done = min(run.results.prompts for run in runs)
    summaries = [summarise(target, run, _baseline(runs, run), chosen) for run in runs]
    logits = record_logits(target, [prompt.ids for prompt in chosen]) if certificate else None
    return {
        "schema": 1,
        "target": {"name": target.title, "fingerprint": target.fingerprint},
        "device": {**_device(target), **({"capture": "none: switched off"} if capture is False else {})},
        "prompts": {
            "name": name,
            "count": prompts_done,
            "requested": len(chosen),
            "max_new_tokens": max_new_tokens,
            "train_overlap": ngram_overlap([p.ids for p in chosen], training_rows) if training_rows else None,
            "repeated_8gram_share": _repetition(runs),
        },
        "runs": summaries,
        **({"break_even": break_even_table(summaries)} if len(set(concurrency)) > 1 else {}),
        **({"comparisons": comparisons(runs, chosen)} if compare else {}),
        "certificate": certify(logits) if certificate else {},
        "interrupted": interrupted,
        **({"notes": [f"not measured: {', '.join(left_out)} at more requests at a time"]} if left_out else {}),
        "provenance": {"command": command_line(sys.argv), "versions": _versions(), "recipe": dict(recipe or {})},
    }


class _Measurement:
    """Decodes all prompts with all runs, interleaved; results are added a whole group at a time."""

    def __init__(self, target: Target, prompts: list[Prompt], runs: list[_Run], options: dict, progress):
        self.target, self.prompts, self.runs, self.options, self.progress = target, prompts, runs, options, progress
        self.rng, self.done = random.Random(0), 0

    def run(self, repeats: int) -> bool:
        """Whether Ctrl-C cut it short; raised again where no group was whole by then."""
        try:
            for run in self.runs:  # Warm-up, not counted: allocations, kernels, caches.
                self._decode(run, list(range(run.concurrency)), min(8, self.options["max_new_tokens"]))
            for _ in range(repeats):
                for concurrency in sorted({run.concurrency for run in self.runs}):
                    for start in range(0, len(self.prompts), concurrency):
                        self._group(start, concurrency)
        except KeyboardInterrupt:
            if not any(run.results.generations for run in self.runs):
                raise
            return True
        if self.progress is not None:
            self.progress(self.done, "done")
        return False

    def _group(self, start: int, concurrency: int) -> None:
        """The prompts from `start` on; a last group that is too small is filled up with others, uncounted."""
        indices = [(start + row) % len(self.prompts) for row in range(concurrency)]
        real = min(concurrency, len(self.prompts) - start)
        runs = [run for run in self.runs if run.concurrency == concurrency]
        found = {}
        for run in self.rng.sample(runs, len(runs)):
            if self.progress is not None:
                self.progress(self.done, run.label)
            found[run.id] = self._decode(run, indices, self.options["max_new_tokens"])
            self.done += 1
        for run in runs:
            run.results.add(indices[:real], *found[run.id])

    def _decode(self, run: _Run, indices: list[int], max_new_tokens: int) -> tuple[Decoded, int | None]:
        cuda = self.target.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.target.device)
        done = generate(
            self.target,
            [self.prompts[index % len(self.prompts)].ids for index in indices],
            run.proposer,
            k=max(run.k, 1),
            sampling=run.sampling,
            requests=indices,
            policy=run.policy,
            acceptance=run.candidate.acceptance if run.candidate else None,
            hold=run.concurrency > 1,
            **{**self.options, "max_new_tokens": max_new_tokens},
        )
        return done, torch.cuda.max_memory_allocated(self.target.device) if cuda else None


def break_even_table(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each draft, K and sampling the number of requests at a time from which it no longer pays (None: not within
    those measured): {"label", "k", "sampling", "mode", "concurrency"}.
    """
    found: dict[tuple, dict] = {}
    for run in runs:
        if run["speedup"] is not None:
            key = (run["label"], run["mode"], tuple(run["sampling"].values()))
            entry = found.setdefault(key, {"run": run, "speedups": {}})
            entry["speedups"][run["concurrency"]] = run["speedup"]
    return [
        {**{name: entry["run"][name] for name in ("label", "k", "sampling", "mode")}, "concurrency": break_even(speeds)}
        for entry in found.values()
        if len(speeds := entry["speedups"]) > 1
    ]


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


def _check_numbers(k: Sequence[int], concurrency: Sequence[int], repeats: int) -> None:
    if not k or min(k) < 1:
        raise EvaluationError(f"k is {list(k)}; expected numbers from 1 on (the plain baseline is always run)")
    if not concurrency or min(concurrency) < 1:
        raise EvaluationError(f"concurrency is {list(concurrency)}; expected numbers of requests at a time, from 1 on")
    if repeats < 1:
        raise EvaluationError(f"repeats is {repeats}; expected at least one pass over the prompts")


def _check_prompts(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Before hours are spent: there is something to time, and room for it behind every prompt."""
    if not prompts:
        raise EvaluationError("no prompts to evaluate on; expected at least one. Mend: give --prompts or data.test")
    if max_new_tokens < 2:
        raise EvaluationError(
            f"max_new_tokens is {max_new_tokens}; expected at least 2: the prefill yields the first token, and only "
            "what follows is timed"
        )
    empty = next((index for index, prompt in enumerate(prompts) if not prompt.ids), None)
    if empty is not None:
        raise EvaluationError(f"prompt {empty} is empty; expected at least one token (the BOS, say)")
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
            # A dynamic tree's children are chosen by probability: exact only for drafts that are not drawn.
            drawn_tree = isinstance(candidate.tree, DynamicTree) and sampling.draws_drafts
            if not drawn_tree and (sampling.greedy or not (candidate.greedy_only and any_greedy)):
                out += [(candidate, k, sampling) for k in candidate.ks or ks]
    return out


def _plan(
    candidates: Sequence[Candidate], ks: Sequence[int], samplings: Sequence[Sampling], concurrency: Sequence[int]
) -> list[_Run]:
    runs = []
    for rows in concurrency:
        for candidate, k, sampling in configurations(candidates, ks, samplings):
            proposer = None if candidate is None else candidate.make()
            policy = candidate.policy(rows) if candidate is not None and candidate.policy else None
            results = Results(adaptive=policy is not None)
            run = _Run("", candidate, k, sampling, rows, proposer, policy, results)
            run.id = re.sub(r"[^\w.>=<()-]+", "-", run.label.replace("k=", "k")) + _suffix(sampling)
            run.id += f"-c{rows}" if rows > 1 else ""
            if proposer is not None and proposer.max_k is not None and k > proposer.max_k:
                raise EvaluationError(
                    f"k is {k}, but {candidate.label} drafts at most {proposer.max_k} tokens deep. Mend: --k up to that"
                )
            runs.append(run)
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


def _baseline(runs: Sequence[_Run], run: _Run) -> _Run:
    return next(other for other in runs if _same_setting(other, run))


def _same_setting(other: _Run, run: _Run) -> bool:
    """Whether `other` is the plain run with the sampling and concurrency of `run`."""
    return other.candidate is None and (other.sampling, other.concurrency) == (run.sampling, run.concurrency)


def _repetition(runs: Sequence[_Run]) -> float | None:
    """Share of repeated 8-grams in the plain outputs: of greedy decoding, or of the first sampling when none is
    greedy.
    """
    plain = [run for run in runs if run.candidate is None]
    run = next((run for run in plain if run.sampling.greedy), plain[0])
    return repeated_ngram_share([generation.tokens for generation in run.results.generations])


def _device(target: Target) -> dict[str, Any]:
    cuda = target.device.type == "cuda"
    return {
        "name": torch.cuda.get_device_name(target.device) if cuda else "CPU",
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "capture": capture_note(target),
        "peak_memory_bytes": process_peak(),
    }


def process_peak() -> int:
    """Bytes at most so far of this process; macOS counts them, Linux KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("drafttrain", "torch", "transformers", "accelerate", "safetensors")}
