"""What drafts cost on this machine, whatever they would draft: whole rounds timed in the evaluator's own loop, with
acceptance at given rates.

Acceptance decides how many rounds a text takes, not what one costs, so random weights cost what trained ones do.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafttrain.drafts.base import Proposer
from drafttrain.evaluate.cost import CostModel, model_from_runs, tau_at
from drafttrain.evaluate.report import EvaluationError
from drafttrain.evaluate.tune import time_widths
from drafttrain.specdec.clock import Clock
from drafttrain.specdec.decode import generate
from drafttrain.specdec.verify import Synthetic
from drafttrain.target import Target

PLAIN = ("", 0)
HEAD_PASSES, WIDTH_PASSES = 5, 3
Update = Callable[[int, str], None]


@dataclass(frozen=True)
class DraftCost:
    """One draft's cost model at the assumed rates, and c at its deepest K in each repeat, in plain steps."""

    model: CostModel
    c: tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """step: seconds of a plain iteration, of its phases' medians; plain: each time it was measured; head: of the
    target's head alone over one token of each row; drafts: by label.
    """

    step: float
    plain: tuple[float, ...]
    head: float
    drafts: dict[str, DraftCost]


def measure_drafts(
    target: Target,
    makes: Mapping[str, Callable[[], Proposer]],
    rates: Mapping[str, Sequence[float]],
    *,
    context: int = 128,
    concurrency: int = 1,
    rounds: int = 8,
    repeats: int = 3,
    progress: Update | None = None,
) -> Costs:
    """Costs of the drafts (label -> makes its proposer) behind `context` random tokens, `concurrency` rows at a time.

    rates: joint acceptance per position of each draft, as deep as it is to be planned; timed at K = 1 and at the
    deepest, for about `rounds` iterations. Everything is interleaved, in an order shuffled anew for each repeat, plain
    decoding several times over, because machines drift; medians over the repeats. Raises EvaluationError where the
    target's or a draft's positions leave no room, and what `generate` raises.
    """
    deepest = max(map(len, rates.values()))
    prompts = _prompts(target, context, concurrency, 2 * rounds * (deepest + 1))
    loop = _Timed(target, {label: make() for label, make in makes.items()}, rates, prompts, rounds)
    items = [(label, k) for label in makes for k in sorted({1, len(rates[label])})]
    spent: dict[tuple[str, int], list[dict[str, float]]] = {}
    heads, widths, rng, done = [], [], random.Random(0), 0
    for item in [PLAIN, *items]:
        loop.run(item, 0, warm=True)
    for repeat in range(repeats):
        order = items + [PLAIN] * (1 + len(items) // 4)
        for item in rng.sample(order, len(order)):
            spent.setdefault(item, []).append(loop.run(item, repeat))
            done += 1
            if progress is not None:
                progress(done, item[0] or "plain")
        heads += _time_head(target, concurrency)
        widths.append(time_widths(target, prompts, range(1, deepest + 2), repeats=WIDTH_PASSES))
    return costs_from(spent, rates, _medians(widths), heads, concurrency)


def costs_from(
    spent: Mapping[tuple[str, int], Sequence[Mapping[str, float]]],
    rates: Mapping[str, Sequence[float]],
    widths: Mapping[int, float],
    heads: Sequence[float],
    concurrency: int = 1,
) -> Costs:
    """The cost models from seconds an iteration by phase: {(label, K), ("", 0) for plain: one dict for each repeat}.

    The target's forward and the rest are the same work whoever drafts: of one K, they are pooled over the drafts.
    """
    plain = _run(0, (), _medians(spent[PLAIN]), concurrency)
    step = plain["seconds"]["verify"] + plain["seconds"]["rest"]
    pooled = {k: _medians([one for (_, at), times in spent.items() if at == k for one in times]) for _, k in spent}
    shared = {k: {phase: seconds[phase] for phase in ("verify", "rest")} for k, seconds in pooled.items()}
    drafts = {}
    for label, joint in rates.items():
        runs = [
            _run(k, joint[:k], _medians(times) | shared[k], concurrency)
            for (one, k), times in sorted(spent.items())
            if one == label
        ]
        deepest = len(joint)
        each = tuple(seconds["draft"] / deepest / step for seconds in spent[label, deepest])
        drafts[label] = DraftCost(model_from_runs(runs, plain, widths, 1), each)
    steps = tuple(one["verify"] + one["rest"] for one in spent[PLAIN])
    return Costs(step, steps, statistics.median(heads), drafts)


def batches(depths: Sequence[int], repeats: int) -> int:
    """How many texts `measure_drafts` decodes for drafts planned so deep: what `progress` counts up to."""
    items = sum(len({1, depth}) for depth in depths)
    return repeats * (items + 1 + items // 4)


class _Timed:
    """Decodes one batch at a time; seconds of each phase an iteration (of `begin`: a text)."""

    def __init__(self, target: Target, proposers: Mapping[str, Proposer], rates, prompts, rounds: int):
        self.target, self.proposers, self.rates = target, proposers, rates
        self.prompts, self.rounds = prompts, rounds

    def run(self, item: tuple[str, int], repeat: int, warm: bool = False) -> dict[str, float]:
        label, k = item
        proposer = self.proposers[label] if label else None
        rates = self.rates[label][:k] if label else ()
        count = 1 if warm else self.rounds
        rows = len(self.prompts)
        done = generate(
            self.target,
            self.prompts,
            proposer,
            k=max(k, 1),
            max_new_tokens=1 + max(1, round(count * tau_at(rates, k))),
            stop_ids=(),
            requests=range(repeat * rows, (repeat + 1) * rows),
            acceptance=Synthetic(tuple(rates)) if label else None,
            hold=rows > 1,
        )
        seconds = asdict(done.seconds)
        return {
            phase: spent if phase in ("begin", "prefill") else spent / done.rounds for phase, spent in seconds.items()
        }


def _prompts(target: Target, context: int, rows: int, new: int) -> list[list[int]]:
    """Random tokens, `context` of each row, or as many as leave room for the new ones."""
    length = min(context, target.max_positions - new)
    if length < 1:
        raise EvaluationError(
            f"{target.title} takes {target.max_positions} positions; timing needs {new} and a prompt. Mend: a smaller K"
        )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (rows, length), generator=generator).tolist()


def _medians(spent: Sequence[Mapping]) -> dict:
    """Of each key, over dicts of the same keys."""
    return {key: statistics.median(one[key] for one in spent) for key in spent[0]}


def _run(k: int, rates: Sequence[float], seconds: Mapping[str, float], concurrency: int) -> dict[str, Any]:
    """The run of a report that `model_from_runs` reads: one round, one text."""
    facts = {"k": k, "tree": None, "rounds": 1, "concurrency": concurrency, "seconds": seconds}
    return {**facts, "per_position_acceptance": tuple(rates), "draft_lengths": [0] * k + [1]}


@torch.no_grad()
def _time_head(target: Target, rows: int) -> list[float]:
    """Seconds of final norm and head over one token of each row, some passes of it, the first left out."""
    head = target.head()
    hidden = torch.ones(rows, 1, target.hidden_size, dtype=target.dtype, device=target.lm_head_weight.device)
    times = []
    for _ in range(HEAD_PASSES + 1):
        clock = Clock(target.device, target.spread)
        head(hidden)
        clock.mark("head")
        times.append(clock.read()[0][1])
    return times[1:]
