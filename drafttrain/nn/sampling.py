"""One place for temperature, top-k, top-p and random numbers, used for the target's p and the draft's q alike.

Every request owns one CPU generator seeded from (seed, request index) and draws by inverse CDF from given uniforms,
so a row of a batch equals its batch-1 run and the q that a token was drawn from is the very tensor that enters the
acceptance ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError

BLOCK = 512


class SamplingError(UserError):
    """Sampling settings out of range, or logits that hold NaN."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 switch the filters off.

    draft_mode: "one_hot" drafts greedily and verifies against a one-hot q (vLLM's default); "probabilistic" draws the
    drafts from q, warped exactly like p.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    draft_mode: Literal["one_hot", "probabilistic"] = "one_hot"

    def __post_init__(self):
        if not self.temperature >= 0:
            raise SamplingError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}, expected a share above 0 and at most 1 (1 switches it off)")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}, expected 0 (off) or more")
        if self.draft_mode not in ("one_hot", "probabilistic"):
            raise SamplingError(f"draft_mode is {self.draft_mode!r}, expected one_hot or probabilistic")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn from q (and a q is kept) instead of taken greedily."""
        return not self.greedy and self.draft_mode == "probabilistic"

    @property
    def mode(self) -> str:
        """The name of this mode in reports: greedy, one_hot or probabilistic."""
        return "greedy" if self.greedy else self.draft_mode


def greedy_choice(logits: Tensor) -> Tensor:
    """Index of the largest logit: [..., V] -> int64 [...]. Raises SamplingError where a logit is NaN."""
    best, index = logits.max(-1)
    _refuse_nan(best)
    return index


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities fp32 [..., V] after temperature, then top-k, then top-p. At temperature 0 all mass is on the
    argmax.

    top-p keeps the most likely tokens whose mass reaches top_p, ties at the edge included. Raises SamplingError where
    a logit is NaN.
    """
    if sampling.greedy:
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, greedy_choice(logits)[..., None], 1.0)
    if 0 < sampling.top_k < logits.shape[-1]:
        best, ids = logits.topk(sampling.top_k, -1)
        _refuse_nan(best[..., 0])
        chosen = (best.float() / sampling.temperature).softmax(-1)
        probabilities = torch.zeros(logits.shape, device=logits.device).scatter_(-1, ids, chosen)
    else:
        scaled = logits.float() / sampling.temperature
        _refuse_nan(scaled.amax(-1))
        probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero what is less likely than the last of the most likely tokens that reach top_p, and make the rest sum to
    one.
    """
    # The head of the distribution nearly always holds the mass: a full sort of 262k words costs more than the target.
    ranked = probabilities.topk(min(1024, probabilities.shape[-1]), -1).values
    if (ranked.sum(-1) < top_p).any():
        ranked = probabilities.sort(-1, descending=True).values
    kept = (ranked.cumsum(-1) - ranked < top_p).sum(-1, keepdim=True)
    cut = probabilities.masked_fill(probabilities < ranked.gather(-1, kept - 1), 0.0)
    return cut / cut.sum(-1, keepdim=True)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row: weights [..., V] (need not sum to one), uniforms float64 [...] in [0, 1) -> int64 [...].

    An index of weight zero is never returned.
    """
    # Block sums first: a running sum over 262k words in double precision costs more than the softmax.
    size = min(BLOCK, weights.shape[-1])
    blocks = F.pad(weights, (0, -weights.shape[-1] % size)).unflatten(-1, (-1, size))
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    goal = uniforms.to(cumulative)[..., None] * cumulative[..., -1:]
    block = _first_beyond(cumulative, goal)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, size))[..., 0, :].double().cumsum(-1)
    rest = goal - (cumulative.gather(-1, block) - sums.gather(-1, block))
    return (block * size + _first_beyond(inside, rest.clamp_min(0)))[..., 0]


def _first_beyond(cumulative: Tensor, goal: Tensor) -> Tensor:
    """Index [..., 1] of the first running sum above the goal; where rounding leaves none, of the last that has
    weight.
    """
    index = torch.searchsorted(cumulative, goal, right=True)
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous(), right=False)
    return torch.minimum(index, last)


def _refuse_nan(largest: Tensor) -> None:
    if torch.isnan(largest).any():
        raise SamplingError(
            "the logits hold NaN: expected finite numbers; check the checkpoint, or load the model in bfloat16 or "
            "float32 instead of float16"
        )


class Streams:
    """One random stream for each request of a batch; `rows` are request indices, kept as the batch shrinks."""

    def __init__(self, seed: int, requests: Sequence[int]):
        self._generators = [_generator(seed, request) for request in requests]

    def uniforms(self, counts: Sequence[int], width: int) -> Tensor:
        """float64 [B, width]: row b holds counts[b] fresh uniforms of its own stream, the rest is zero."""
        out = torch.zeros(len(self._generators), width, dtype=torch.float64)
        for row, (generator, count) in enumerate(zip(self._generators, counts, strict=True)):
            if count:
                out[row, :count] = torch.rand(count, generator=generator, dtype=torch.float64)
        return out

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._generators = [self._generators[row] for row in rows]


def _generator(seed: int, request: int) -> torch.Generator:
    # The two numbers are mixed (splitmix64) so that neighbouring requests and seeds do not share streams.
    state = (seed * 0x9E3779B97F4A7C15 + request * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    return torch.Generator().manual_seed((state ^ (state >> 31)) % 2**63)
