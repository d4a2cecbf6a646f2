"""How many tokens to draft: policies that stop a draft that has become unsure, or choose K for the whole batch.

A policy may look at what is committed and at the draft's distribution of the token that comes next, never at that
token's own value. A token dropped because of its value would leave the kept ones drawn from another distribution than
the q they are verified against; decided before the draw, verification stays exact.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from drafttrain.errors import UserError


class PolicyError(UserError):
    """A policy that does not exist, or numbers that make no sense for it."""


class Policy:
    """Drafts as many tokens as asked. The base of all policies. They may hold running estimates: a fresh one for each
    run."""

    name: str = "fixed"
    """As reports show it, e.g. "confidence>=0.4"."""
    watches: ClassVar[bool] = False
    """Whether `stop` is to be asked at all."""

    def limit(self, k: Tensor) -> Tensor:
        """Before a round: drafts for each row, int64 [B], at most k int64 [B]; 0 allowed."""
        return k

    def stop(self, logits: Tensor) -> Tensor:
        """bool [B]: rows that draft no further. logits [B, Vd]: the draft's raw ones for the token it would draw
        next, which stays undrawn where the row stops."""
        return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)

    def observe(self, drafted: Tensor, accepted: Tensor) -> None:
        """After a round: drafted and accepted tokens of each row, int64 [B] (trees: the depth, for drafted)."""


class Confidence(Policy):
    """Stops where the draft's likeliest token has a probability below the threshold; .4 is transformers' default.

    transformers looks at the token just drafted and keeps it; here a draft below the threshold is never made.
    """

    watches = True

    def __init__(self, threshold: float = 0.4):
        _check("confidence", threshold, 0 < threshold <= 1, "a probability above 0 and at most 1, e.g. 0.4")
        self.threshold, self.name = threshold, f"confidence>={threshold:g}"

    def stop(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits.amax(-1) - logits.logsumexp(-1) < math.log(self.threshold)


class EntropyBound(Policy):
    """Stops where 1 - sqrt(.2 H) < threshold, H the draft's entropy in nats: the left side estimates a lower bound of
    the acceptance (AdaEDL, arXiv 2410.18351)."""

    watches = True

    def __init__(self, threshold: float):
        _check(
            "entropy", threshold, math.isfinite(threshold) and threshold <= 1, "at most 1 (1 - sqrt(.2 H)), e.g. 0.3"
        )
        self.threshold, self.name = threshold, f"1-sqrt(.2H)>={threshold:g}"

    def stop(self, logits: Tensor) -> Tensor:
        return 1 - (0.2 * _entropy(logits)).sqrt() < self.threshold


class Svip(Policy):
    """Stops where sqrt(H) > threshold, H the draft's entropy in nats (SVIP, arXiv 2411.18462)."""

    watches = True

    def __init__(self, threshold: float):
        _check("svip", threshold, 0 < threshold < math.inf, "above 0 (sqrt of an entropy in nats), e.g. 1.2")
        self.threshold, self.name = threshold, f"sqrt(H)<={threshold:g}"

    def stop(self, logits: Tensor) -> Tensor:
        return _entropy(logits).sqrt() > self.threshold


@dataclass(frozen=True)
class Costs:
    """In plain steps: c a draft, v[K] the verification of K drafts for K = 0.., o all else of an iteration, round what
    the draft takes in every iteration, also when it drafts nothing (EAGLE-3 reads the accepted tokens).
    """

    c: float
    v: Sequence[float]
    o: float
    round: float = 0.0

    def __post_init__(self):
        numbers = (self.c, *self.v, self.o, self.round)
        if not self.v or not all(0 <= x < math.inf for x in numbers) or not min(self.v) + self.o > 0:
            raise PolicyError(
                f"the costs are c={self.c}, v={list(self.v)}, o={self.o}; expected finite numbers of at least 0 and a "
                "v above 0 for K = 0, 1, ..: measure them again, on more prompts"
            )

    def iteration(self, k: int) -> float:
        """v[k] + k c + round + o; beyond the end of v its last slope holds on, if it rises."""
        last = len(self.v) - 1
        slope = self.v[-1] - self.v[-2] if last else 0.0
        return self.v[min(k, last)] + max(k - last, 0) * max(slope, 0.0) + k * self.c + self.round + self.o


class Goodput(Policy):
    """Each round one K for the whole batch, 0 included: the one with the most expected tokens per plain step,
    (1 + a1 + a1 a2 + ..) / (v[K] + K c + round + o), ties to the smaller (TurboSpec, arXiv 2406.14066).

    a_i: running share of accepted drafts at position i among those whose predecessors stood; what was seen fades by
    the factor `memory` a round, and a position starts from one trial at the optimistic `prior`. Positions that K leaves
    out are not observed, so after `probe` rounds below the limit one round drafts up to it. K depends on the batch's
    other rows: a sampled row has the distribution of its batch-1 run, not its tokens.
    """

    def __init__(self, costs: Costs, probe: int = 32, memory: float = 0.95, prior: float = 0.8):
        _check("goodput", probe, probe >= 1, "a probe every 1 or more rounds, e.g. 32")
        self.costs, self.probe, self.memory, self.prior, self.name = costs, probe, memory, prior, "goodput"
        self._tried: list[float] = []
        self._stood: list[float] = []
        self._below = 0

    def acceptance(self, position: int) -> float:
        """The running estimate at a position, counted from 0, given that all before it stood."""
        return self._stood[position] / self._tried[position] if position < len(self._tried) else self.prior

    def best(self, most: int) -> int:
        """The K within 0..most of the highest expected tokens per plain step."""
        best, highest, tokens, joint = 0, 1 / self.costs.iteration(0), 1.0, 1.0
        for k in range(1, most + 1):
            joint *= self.acceptance(k - 1)
            tokens += joint
            if tokens / self.costs.iteration(k) > highest:
                best, highest = k, tokens / self.costs.iteration(k)
        return best

    def limit(self, k: Tensor) -> Tensor:
        most = int(k.max())
        chosen = most if self._below >= self.probe else self.best(most)
        self._below = self._below + 1 if chosen < most else 0
        return k.clamp_max(chosen)

    def observe(self, drafted: Tensor, accepted: Tensor) -> None:
        for i in range(int(drafted.max())):
            tried = int(((drafted > i) & (accepted >= i)).sum())
            if i == len(self._tried):
                self._tried.append(1.0)
                self._stood.append(self.prior)
            if tried:  # A position that nobody reached keeps its estimate.
                self._tried[i] = self.memory * self._tried[i] + tried
                self._stood[i] = self.memory * self._stood[i] + int((accepted > i).sum())


PolicyFactory = Callable[[Costs | None], Policy]


def parse_policy(text: str) -> PolicyFactory:
    """confidence, confidence:0.4, entropy:0.3, svip:1.2 or goodput -> what makes a fresh policy for each run.

    The costs that the factory takes are for goodput alone, which raises PolicyError without them; PolicyError here for
    any other text.
    """
    kind, colon, value = text.strip().partition(":")
    makers = {"confidence": Confidence, "entropy": EntropyBound, "svip": Svip}
    if kind == "goodput" and not colon:
        return _goodput
    if kind not in makers or (not value and (colon or kind != "confidence")):
        raise PolicyError(
            f"the policy is {text!r}; expected confidence:0.4, entropy:0.3, svip:1.2 (thresholds as you like) or "
            "goodput"
        )
    try:
        thresholds = [float(value)] if colon else []
    except ValueError:
        raise PolicyError(f"the policy is {text!r}; expected a number after the colon, e.g. {kind}:0.4") from None
    makers[kind](*thresholds)  # A threshold out of range is told here, not after the target was loaded.
    return lambda costs: makers[kind](*thresholds)


def _goodput(costs: Costs | None) -> Policy:
    if costs is None:
        raise PolicyError(
            "the policy goodput was asked for without costs; expected measured c, v and o. Mend: run `drafttrain tune` "
            "first, or choose confidence:0.4"
        )
    return Goodput(costs)


def _check(kind: str, value: float, fits: bool, expected: str) -> None:
    if not fits:
        raise PolicyError(f"the policy {kind} has {value}, expected {expected}")


def _entropy(logits: Tensor) -> Tensor:
    """In nats: [B, Vd] -> fp32 [B]."""
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)
