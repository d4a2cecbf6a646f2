"""The decoding loop against transformers' own on Gemma 3 270M, bf16, greedy, batch 1: overhead, plain, speculative.

    python scripts/bench_loop.py --draft checkpoints/demo

a: everything but the target's forwards and the draft is at most 5% of an iteration, plain and with an EAGLE-3 draft.
b: plain decoding is at least as fast as transformers' `generate`. c: speculative decoding is at least 1.2 times as fast
as transformers' assisted generation with the same small draft (some of the target's own layers, untrained) and the same
K; beside it, where an EAGLE-3 draft is given, with only the head rows of that one's draft vocabulary.

transformers hands its head a slice whose batch stride is not canonical; torch's bf16 product on CPUs then reorders all
262k rows, over a second each time: at every prefill and, assisted, in most rounds. So it is also measured with that
input copied ("head input copied"), which says what the loops themselves differ by. All ways are interleaved prompt by
prompt and make the same number of tokens. A quarter of an hour on two CPU cores with nothing else running. Exits with 1
on any FAIL; comparisons with the copied input carry no verdict.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from drafttrain.cli import run_command
from drafttrain.demo import PROMPTS, demo_target, prompt_folder
from drafttrain.drafts.base import Draft, Proposer
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.small_model import SmallModelProposer, prune_layers
from drafttrain.evaluate.divergence import first_divergence
from drafttrain.evaluate.run import load_prompts
from drafttrain.recipe import DataEntry
from drafttrain.specdec.decode import Seconds, generate
from drafttrain.target import Target

REST_AT_MOST, PLAIN_AT_LEAST, ASSISTED_AT_LEAST = 0.05, 1.0, 1.2
TIE_ULPS = 2.0
FEW_ROWS, COPIED = "small model, draft vocabulary", ", head input copied"
RESAMPLES = 2000


@dataclass
class Run:
    """One way of decoding, over all prompts: seconds of the whole call, seconds a token behind the first delivery,
    tokens, and the target's forwards with the tokens they yielded (a prefill that yields one token left out)."""

    whole: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    yielded: list[int] = field(default_factory=list)
    phases: list[Seconds] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        return sum(self.yielded) / sum(self.forwards)

    @property
    def rest(self) -> list[float]:
        """Of each prompt: the share of an iteration outside the target's forward and the proposer."""
        return [s.rest / (s.draft + s.verify + s.rest) for s in self.phases]


Way = Callable[[list[int], Run], None]


class Arrivals:
    """A streamer for `generate` that only notes when tokens arrive, and how many."""

    def __init__(self):
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value) -> None:
        """Called with the prompt first, then with every delivery."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to flush."""


def copy_input(module, args) -> tuple[torch.Tensor]:
    """A hook: the same numbers with canonical strides."""
    return (args[0].clone(memory_format=torch.contiguous_format),)


class Sides:
    """Our loop and transformers' on the same prompts, `count` new tokens each."""

    def __init__(self, target: Target, count: int, k: int):
        self.target, self.count, self.k = target, count, k

    def ours(self, proposer: Proposer | None) -> Way:
        def once(prompt: list[int], run: Run) -> None:
            start = time.perf_counter()
            done = generate(self.target, [prompt], proposer, k=self.k, max_new_tokens=self.count, stop_ids=())
            run.whole.append(time.perf_counter() - start)
            run.decode.append(done.seconds.decode / (self.count - 1))
            run.tokens.append(done.generations[0].tokens)
            run.forwards.append(done.rounds)
            run.yielded.append(self.count - 1)
            run.phases.append(done.seconds)

        return once

    def theirs(self, assistant: Target | None, copied: bool = False) -> Way:
        models = [self.target.model] if assistant is None else [self.target.model, assistant.model]
        options = {"do_sample": False, "min_new_tokens": self.count, "max_new_tokens": self.count}
        if assistant is not None:
            settings = assistant.model.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = self.k, "constant"
            settings.assistant_confidence_threshold = 0.0
            options["assistant_model"] = assistant.model

        def once(prompt: list[int], run: Run) -> None:
            calls = []
            hooks = [self.target.model.register_forward_hook(lambda *_: calls.append(1))]
            if copied:
                hooks += [model.get_output_embeddings().register_forward_pre_hook(copy_input) for model in models]
            arrivals, start = Arrivals(), time.perf_counter()
            ids = torch.tensor([prompt])
            out = self.target.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=arrivals, **options)
            end = time.perf_counter()
            for hook in hooks:
                hook.remove()
            run.whole.append(end - start)
            run.decode.append((end - arrivals.times[1]) / (self.count - arrivals.counts[1]))
            run.tokens.append(out[0, len(prompt) :].tolist())
            # Assisted, the prefill verifies drafts too.
            run.forwards.append(len(calls) - (assistant is None))
            run.yielded.append(self.count - (assistant is None))

        return once


def measure(ways: dict[str, Way], prompts: Sequence[list[int]]) -> dict[str, Run]:
    """All ways on each prompt in turn, the order turned round from prompt to prompt, after a warm-up on the first."""
    runs = {name: Run() for name in ways}
    for once in ways.values():
        once(prompts[0], Run())
    for number, prompt in enumerate(prompts):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            ways[name](prompt, runs[name])
    return runs


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float | list[float]]:
    """Ratio of the medians, with the least and the largest of the pairs and a 95% bootstrap interval over prompts."""
    top, bottom = np.asarray(theirs), np.asarray(ours)
    draws = np.random.default_rng(0).integers(0, len(top), (RESAMPLES, len(top)))
    resampled = np.median(top[draws], 1) / np.median(bottom[draws], 1)
    pairs = top / bottom
    return {
        "ratio": float(np.median(top) / np.median(bottom)),
        "spread": [float(pairs.min()), float(pairs.max())],
        "interval": [float(x) for x in np.percentile(resampled, [2.5, 97.5])],
    }


def widest_tie(target: Target, prompts: Sequence[list[int]], run: Run, plain: Run) -> float:
    """bf16 steps between the two choices where a text first leaves plain decoding's; 0 where none does."""
    found = [first_divergence(target, *texts) for texts in zip(prompts, run.tokens, plain.tokens, strict=True)]
    return max((abs(one["ulps"]) for one in found if one is not None), default=0.0)


class Verdicts:
    """PASS and FAIL lines, kept for the JSON."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.found = say, []

    def check(self, name: str, value: float, passed: bool, text: str) -> None:
        self.found.append({"name": name, "value": value, "passed": passed})
        self.say(f"{'PASS' if passed else 'FAIL'} {name}: {text}")

    def faster(self, name: str, theirs: Run, ours: Run, at_least: float | None) -> dict:
        """Compare whole calls and what lies behind the first delivery; at_least None: without a verdict."""
        figures = {"whole": ratio(theirs.whole, ours.whole), "decode": ratio(theirs.decode, ours.decode)}
        for span, figure in figures.items():
            (low, high), (least, most) = figure["interval"], figure["spread"]
            text = (
                f"{figure['ratio']:.3f} times as fast (95% interval {low:.3f}..{high:.3f}, prompts {least:.2f}.."
                f"{most:.2f})"
            )
            if at_least is None:
                self.say(f"     {name}, {span}: {text}")
            else:
                text += f", expected at least {at_least}"
                self.check(f"{name}, {span}", figure["ratio"], figure["ratio"] >= at_least, text)
        return figures


def overhead(runs: dict[str, Run], verdicts: Verdicts) -> dict:
    """Part a, from runs of our loop."""
    out = {}
    for name, run in runs.items():
        share = sum(s.rest for s in run.phases) / sum(s.draft + s.verify + s.rest for s in run.phases)
        text = f"{share:.2%} of an iteration (prompts {min(run.rest):.2%}..{max(run.rest):.2%}; expected at most 5%)"
        verdicts.check(f"a: rest, {name}", share, share <= REST_AT_MOST, text)
        out[name] = {"rest": share, "spread": [min(run.rest), max(run.rest)]}
    return out


def same_acceptance(name: str, theirs: Run, ours: Run, verdicts: Verdicts) -> None:
    """Part c: both sides accept alike. Where the last round is cut, and at ties, they differ by a round for each prompt
    at most."""
    gap = ours.tokens_per_forward / theirs.tokens_per_forward - 1
    noise = len(ours.forwards) / sum(ours.forwards)
    text = (
        f"{ours.tokens_per_forward:.3f} tokens a forward, transformers {theirs.tokens_per_forward:.3f} ({gap:+.1%}; "
        f"expected within {noise:.1%})"
    )
    verdicts.check(f"{name}, same acceptance", gap, abs(gap) <= noise, text)


def show(runs: dict[str, Run], console: Console) -> None:
    """A row for each way of decoding."""
    table = Table("", "tok/s decode", "ms a call", "min..max", "tok/forward", "draft ms", "verify ms", "rest ms")
    for name, run in runs.items():
        phases = ["", "", ""]
        if run.phases:
            totals = (sum(getattr(s, phase) for s in run.phases) for phase in ("draft", "verify", "rest"))
            phases = [f"{1000 * total / sum(run.forwards):.2f}" for total in totals]
        table.add_row(
            name,
            f"{1 / statistics.median(run.decode):.1f}",
            f"{1000 * statistics.median(run.whole):.0f}",
            f"{1000 * min(run.whole):.0f}..{1000 * max(run.whole):.0f}",
            f"{run.tokens_per_forward:.2f}",
            *phases,
        )
    console.print(table)


def ways_of(sides: Sides, wanted: set[str], eagle: Draft | None, small: Target) -> dict[str, Way]:
    """What the wanted parts compare, by name; eagle: the EAGLE-3 draft, if there is one."""
    ways = {"plain": sides.ours(None)}
    if "a" in wanted and eagle is not None:
        ways["eagle3"] = sides.ours(eagle.proposer(sides.target))
    if "b" in wanted:
        ways |= {"transformers": sides.theirs(None), f"transformers{COPIED}": sides.theirs(None, copied=True)}
    if "c" in wanted:
        ways |= {"assisted": sides.theirs(small), f"assisted{COPIED}": sides.theirs(small, copied=True)}
        ways["small model"] = sides.ours(SmallModelProposer(small))
        if eagle is not None:
            ways[FEW_ROWS] = sides.ours(SmallModelProposer(small, eagle.draft_ids.cpu()))
    return ways


def judge(runs: dict[str, Run], target: Target, chosen, with_overhead: bool, verdicts: Verdicts) -> dict[str, dict]:
    """A verdict for each claim that was measured; returns the figures behind them."""
    figures: dict[str, dict] = {}
    if with_overhead:
        figures["a"] = overhead({name: runs[name] for name in ("plain", "eagle3") if name in runs}, verdicts)
    for other in (name for name in ("transformers", f"transformers{COPIED}") if name in runs):
        at_least = None if COPIED in other else PLAIN_AT_LEAST
        figures[other] = verdicts.faster(f"b: plain against {other}", runs[other], runs["plain"], at_least)
    for name in (name for name in ("small model", FEW_ROWS) if name in runs):
        ours, theirs = runs[name], runs["assisted"]
        figures[name] = verdicts.faster(f"c: {name} against assisted", theirs, ours, ASSISTED_AT_LEAST)
        copied = runs[f"assisted{COPIED}"]
        figures[name + COPIED] = verdicts.faster(f"c: {name} against assisted{COPIED}", copied, ours, None)
        if name != FEW_ROWS:
            same_acceptance(f"c: {name}", theirs, ours, verdicts)
        ulps = widest_tie(target, chosen, ours, runs["plain"])
        text = f"first differences within {ulps:.1f} bf16 steps (a tie: at most {TIE_ULPS:g})"
        verdicts.check(f"c: {name}, text of plain decoding", ulps, ulps <= TIE_ULPS, text)
    return figures


def main(
    draft: Annotated[str | None, typer.Option(help="EAGLE-3 draft for part a: run, draft folder or hub id.")] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=2, max=PROMPTS["validation"])] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=8)] = 80,
    k: Annotated[int, typer.Option(help="Drafts a round.", min=1)] = 4,
    layers: Annotated[str, typer.Option(help="Target layers, from 0, that make the small draft.")] = "0,1,3,5,10,11",
    parts: Annotated[str, typer.Option(help="Which of a, b and c to run.")] = "a,b,c",
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON at the end.")] = False,
) -> None:
    """Measure, print a table, and a PASS or FAIL line for each claim."""
    wanted = set(parts.split(","))
    if not wanted <= {"a", "b", "c"}:
        raise typer.BadParameter(f"--parts is {parts!r}, expected some of a,b,c")
    target = demo_target()
    # Texts of equal length on both sides: neither looks for a stop.
    target.model.generation_config.eos_token_id = None
    entries = [DataEntry(path=str(prompt_folder(target) / "validation.jsonl"))]
    chosen = [list(prompt.ids) for prompt in load_prompts(entries, target, "auto", prompts, 0)]
    eagle = load_draft(draft, target) if draft is not None else None
    small = prune_layers(target, [int(layer) for layer in layers.split(",")])
    ways = ways_of(Sides(target, max_new_tokens, k), wanted, eagle, small)
    console = Console(stderr=as_json, width=130)
    runs = measure(ways, chosen)
    show(runs, console)
    verdicts = Verdicts(lambda line: console.print(line, highlight=False, soft_wrap=True))
    figures = judge(runs, target, chosen, "a" in wanted, verdicts)
    if as_json:
        print(json.dumps({"figures": figures, "verdicts": verdicts.found, "k": k, "threads": torch.get_num_threads()}))
    if not all(one["passed"] for one in verdicts.found):
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
