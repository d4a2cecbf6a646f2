"""A few rows of vLLM's hidden states against the target's own: the same weights, layers counted alike, no norm behind
the last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from drafttrain.data.http_client import EngineError
from drafttrain.target import Target

TOLERANCE = 1e-3
TOLERANCE_16 = 0.1
"""Relative error that the median position may have between two implementations in fp32, and in 16 bits."""
NORMED = "after the final norm"


@dataclass(frozen=True)
class Reference:
    """What the target computes here for a row, on the CPU: hs[k] [T, Ht] of the asked layers and of those beside them,
    and norm(hs[n]).
    """

    index: int
    states: Mapping[int, Tensor]
    normed: Tensor

    @classmethod
    def of(cls, target: Target, layers: Sequence[int], row: dict) -> Self:
        """The reference of a row; layers: the asked ones."""
        n = target.num_layers
        around = sorted({j for k in layers for j in (k - 1, k, k + 1) if 0 <= j <= n} | {n})
        states = target.hidden_states(torch.tensor([row["input_ids"]]), None, around)
        normed = target.head().normed(states[n])
        return cls(row["index"], {k: state[0].cpu() for k, state in states.items()}, normed[0].cpu())


def spread(rows: Sequence[int], count: int) -> list[int]:
    """`count` of the rows or, where they are fewer, all of them, evenly from the first on."""
    count = min(count, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def compare(found: Sequence[Tensor], references: Sequence[Reference], layers: Sequence[int]) -> dict[str, Any]:
    """{"samples", "tokens", "relative_error": {k: median over positions}} of hidden states [T, A', Ht] of each row, of
    the asked layers, the last one hs[n], against the references.

    Rows that are not finite are left out. EngineError where a layer is another one, normed, or too far off.
    """
    pairs = [
        (states, reference)
        for states, reference in zip(found, references, strict=True)
        if all(values.isfinite().all() for values in (states, *reference.states.values()))
    ]
    facts = {"samples": len(pairs), "tokens": sum(len(states) for states, _ in pairs), "relative_error": {}}
    if not pairs:
        return facts
    narrow = any(values.dtype != torch.float32 for values in (pairs[0][0], *pairs[0][1].states.values()))
    tolerance = TOLERANCE_16 if narrow else TOLERANCE
    for place, k in enumerate(layers):
        ours = {f"hs[{j}]": [reference.states[j] for _, reference in pairs] for j in _beside(k, pairs[0][1])}
        if k == layers[-1]:
            ours[f"hs[{k}] {NORMED}"] = [reference.normed for _, reference in pairs]
        theirs = [states[:, place].cpu() for states, _ in pairs]
        errors = {name: _relative_error(theirs, states) for name, states in ours.items()}
        error, nearest = errors[f"hs[{k}]"], min(errors, key=errors.get)
        if nearest != f"hs[{k}]":
            raise EngineError(
                f"vLLM's hs[{k}] is this target's {nearest} (relative error {errors[nearest]:.2g}; {error:.2g} to "
                f"hs[{k}]). Expected layers {list(layers)}, the last one un-normed. Mend: a server started with these "
                "as eagle_aux_hidden_state_layer_ids, or another release of vLLM"
            )
        if not error <= tolerance:
            raise EngineError(
                f"vLLM's hs[{k}] is off by {error:.2g} of the target's own (median of {facts['tokens']} positions). "
                f"Expected at most {tolerance:g} of the same weights. Mend: serve the recipe's target, in its dtype; "
                "features.vllm.check_samples 0 where it is meant to differ, as a quantised one does"
            )
        facts["relative_error"][str(k)] = error
    return facts


def _beside(k: int, reference: Reference) -> list[int]:
    return [j for j in (k - 1, k, k + 1) if j in reference.states]


def _relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The median over positions of |found - expected| / |expected|: means would be those of a few massive channels."""
    parts = []
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs.float()
        parts.append((ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30))
    return torch.cat(parts).median().item()
