"""Whether another program accepts a draft's tokens as our evaluator does: the declared rule, and what our side takes.

Both sides decode the same prompts greedily and ignore stop tokens. Agreement: the 95% interval (bootstrap over
prompts, paired) of the relative difference of the acceptance length lies within +-5%, and each position's acceptance
within +-.04.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from drafttrain.drafts.base import Proposer
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.small_model import SmallModelProposer
from drafttrain.evaluate.statistics import bootstrap_speedup
from drafttrain.specdec.decode import generate
from drafttrain.target import Target

TAU_WITHIN = 0.05  # relative
POSITION_WITHIN = 0.04
CRITERION = {"tau_interval_within": TAU_WITHIN, "positions_within": POSITION_WITHIN}


def proposer_as_served(folder: Path, target: Target) -> Proposer:
    """The proposer of a draft folder in the target's dtype. Small models draft from every word: other programs read no
    draft vocabulary of theirs. DraftError as load_draft."""
    draft = load_draft(folder, target, target.dtype)
    if isinstance(draft, KdDraft):
        return SmallModelProposer(draft.small_target())
    return draft.proposer(target)


def decode_one(target: Target, prompt: Sequence[int], proposer: Proposer | None, k: int, count: int) -> dict[str, Any]:
    """`count` new tokens of one prompt by our loop, stops ignored.

    {tokens, decoded (without the prefill's), seconds of decoding, whole (seconds of the call), draft_rounds, accepted,
    reached[i]: rounds whose first i + 1 drafts were all accepted}.
    """
    start = time.perf_counter()
    done = generate(target, [list(prompt)], proposer, k=k, max_new_tokens=count, stop_ids=())
    whole = time.perf_counter() - start
    counts = done.counts
    return {
        "tokens": list(done.generations[0].tokens),
        "decoded": counts.emitted - 1,
        "seconds": done.seconds.decode,
        "whole": whole,
        "draft_rounds": counts.draft_rounds,
        "accepted": counts.accepted,
        "reached": list(counts.reached),
    }


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """One dict of lists from a list of dicts with the same keys."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def agreement(ours: Mapping[str, Sequence], theirs: Mapping[str, Sequence], k: int) -> dict[str, Any]:
    """Differences (theirs less ours) and the verdict, from per-prompt draft_rounds, accepted and reached[position]."""
    sides = [_pooled(side, k) for side in (ours, theirs)]
    relative = sides[1]["tau"] / sides[0]["tau"] - 1
    # tau is a ratio of sums, (rounds + accepted) / rounds, so the ratio of two taus is bootstrapped like a speedup.
    tokens_rounds = [[_tokens(side), side["draft_rounds"]] for side in (theirs, ours)]
    interval = bootstrap_speedup(*tokens_rounds[0], *tokens_rounds[1])
    bounds = None if interval is None else [bound - 1 for bound in interval]
    positions = [b - a for a, b in zip(*(side["per_position"] for side in sides), strict=True)]
    tau_agrees = bounds is not None and -TAU_WITHIN <= bounds[0] <= bounds[1] <= TAU_WITHIN
    return {
        "ours": sides[0],
        "theirs": sides[1],
        "tau": {"relative_difference": relative, "interval": bounds, "within": TAU_WITHIN, "agrees": tau_agrees},
        "positions": [
            {"difference": found, "within": POSITION_WITHIN, "agrees": abs(found) <= POSITION_WITHIN}
            for found in positions
        ],
        "agrees": tau_agrees and all(abs(found) <= POSITION_WITHIN for found in positions),
    }


def _tokens(side: Mapping[str, Sequence]) -> list[int]:
    return [rounds + accepted for rounds, accepted in zip(side["draft_rounds"], side["accepted"], strict=True)]


def _pooled(side: Mapping[str, Sequence], k: int) -> dict[str, Any]:
    rounds = sum(side["draft_rounds"])
    reached = [sum(row[i] for row in side["reached"] if i < len(row)) for i in range(k)]
    return {
        "draft_rounds": rounds,
        "accepted": sum(side["accepted"]),
        "tau": 1 + sum(side["accepted"]) / rounds,
        "per_position": [count / rounds for count in reached],
    }


def agreement_table(result: Mapping[str, Any], other: str) -> Table:
    """One row for each figure; other: the other program's name."""
    table = Table("figure", "ours", other, "difference", "allowed", "")
    tau, ours, theirs = result["tau"], result["ours"], result["theirs"]
    bounds = "" if tau["interval"] is None else " [{:+.2%}, {:+.2%}]".format(*tau["interval"])
    table.add_row(
        "acceptance length",
        f"{ours['tau']:.3f}",
        f"{theirs['tau']:.3f}",
        f"{tau['relative_difference']:+.2%}{bounds}".replace("[", r"\["),
        f"interval within {TAU_WITHIN:.0%}",
        "agrees" if tau["agrees"] else "DISAGREES",
    )
    for i, position in enumerate(result["positions"]):
        table.add_row(
            f"accepted at position {i + 1}",
            f"{ours['per_position'][i]:.3f}",
            f"{theirs['per_position'][i]:.3f}",
            f"{position['difference']:+.3f}",
            f"{POSITION_WITHIN:g}",
            "agrees" if position["agrees"] else "DISAGREES",
        )
    return table
