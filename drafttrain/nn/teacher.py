"""What the target says about each position, a block of rows at a time: from its last states, or from its k likeliest
words.

Both give p on the draft vocabulary, a sub-distribution of mass <= 1. A teacher is opened for a chunk of positions (one
product) and read in blocks of it, so that wide [rows, Vd] matrices exist for a block only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LEAST_LOG = -1e4
"""Log-probabilities are cut off here: exp of it is 0 in every dtype, and 0 * log 0 stays 0."""
TINY = 1e-30
GROUP = 128


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row sum of products, [n, V] x [n, V] -> [n]. (On CPUs an einsum takes five times as long.)"""
    return (a * b).sum(-1)


def argmax(z: Tensor) -> Tensor:
    """z [n, V] -> int64 [n], the first of equals. In groups: torch's own takes five times as long on CPUs, more than a
    softmax.
    """
    rows, words = z.shape
    if words % GROUP:
        return z.argmax(-1)
    groups = z.view(rows, -1, GROUP)
    best = groups.amax(-1).argmax(-1)
    return best * GROUP + groups[torch.arange(rows, device=z.device), best].argmax(-1)


class DraftWords:
    """The draft's distribution over its vocabulary for n rows.

    z [n, Vd]: logits; top int64 [n]: their argmax; q [n, Vd]: softmax; lse [n]: log-sum-exp; log_q on demand.
    """

    def __init__(self, z: Tensor):
        self.z = z
        self.top = argmax(z)
        self.q = z.softmax(-1)
        highest, likeliest = (x.gather(-1, self.top[:, None])[:, 0] for x in (z, self.q))
        self.lse = highest - likeliest.log()  # At least 1 / Vd: safe.

    @cached_property
    def log_q(self) -> Tensor:
        return self.z - self.lse[:, None]

    def log_q_at(self, index: Tensor) -> Tensor:
        """log q of one word a row: int64 [n] -> [n]."""
        return self.z.gather(-1, index[:, None])[:, 0] - self.lse


class TeacherWords:
    """p and log p [n, Vd] of n rows, mass [n] = sum p: of a whole vocabulary too, since the sum of 262k fp32 words is
    off one by 5e-5, which times a log-sum-exp of 15 would pass for a divergence.
    """

    def __init__(self, log_p: Tensor):
        self.log_p = log_p.clamp_(min=LEAST_LOG)
        self.p = self.log_p.exp()
        self.mass = self.p.sum(-1)

    @cached_property
    def negative_entropy(self) -> Tensor:
        """sum p log p [n]."""
        return dot(self.p, self.log_p)


class SpreadWords:
    """The k known words of n rows as they are, the tail's mass spread over the other words in the draft's own shares.

    As p_i / q_i is then one number over the whole tail, every loss and its gradient (p held fixed) is that of the k + 1
    buckets. Mass of words outside the draft vocabulary (ids -1) is lost; the tail is 1 - the mass of ALL k.
    """

    def __init__(self, ids: Tensor, log_p: Tensor, draft: DraftWords):
        self._draft, self._index, self._known, self._log = draft, ids.clamp_min(0), ids >= 0, log_p
        probability = log_p.exp()
        self._tail = (1 - probability.sum(-1)).clamp_min(0)
        # Sums, not writes: words that are not known point at word 0, which may be known itself.
        rest = draft.q.scatter_add(-1, self._index, -draft.q.gather(-1, self._index) * self._known)
        self._q_tail = rest.sum(-1)
        share = self._tail / self._q_tail.clamp_min(TINY)
        self.p = rest.mul_(share[:, None]).scatter_add_(-1, self._index, probability * self._known)
        self.mass = (probability * self._known).sum(-1) + self._tail * (self._q_tail > 0)

    @cached_property
    def log_p(self) -> Tensor:
        ratio = self._tail.clamp_min(TINY).log() - self._q_tail.clamp_min(TINY).log()
        out = self._draft.log_q + ratio[:, None]
        out.scatter_add_(-1, self._index, (self._log - out.gather(-1, self._index)) * self._known)
        return out.clamp_(min=LEAST_LOG)

    @cached_property
    def negative_entropy(self) -> Tensor:
        """sum p log p [n]."""
        return dot(self.p, self.log_p)


Words = TeacherWords | SpreadWords


class DenseBlock:
    """n rows of a dense teacher: logits [n, Vd], lse [n] over the full vocabulary or None (these ARE the full one)."""

    def __init__(self, logits: Tensor, lse: Tensor | None):
        self.logits, self.lse = logits, lse
        self._words: dict[float, TeacherWords] = {}

    def argmax(self) -> Tensor:
        """The target's argmax as a draft index, int64 [n]."""
        assert self.lse is None, "the argmax over a draft vocabulary is not the target's: give target_index"
        return argmax(self.logits)

    def words(self, draft: DraftWords, temperature: float = 1.0) -> Words:
        """p at a temperature. It does not hang on the draft: every unroll step gets the same."""
        if temperature not in self._words:
            if self.lse is None:
                logits = self.logits if temperature == 1 else self.logits / temperature
                self._words[temperature] = TeacherWords(logits.log_softmax(-1))
            else:
                assert temperature == 1, "a temperature needs a teacher over the full vocabulary (lse None)"
                self._words[temperature] = TeacherWords(self.logits - self.lse[:, None])
        return self._words[temperature]


@dataclass
class DenseChunk:
    """The teacher's logits [n, Vd] of a chunk of positions, in the head's dtype."""

    logits: Tensor
    lse: Tensor | None

    def block(self, rows: slice, dtype: torch.dtype) -> DenseBlock:
        """Some of its rows, widened to dtype."""
        return DenseBlock(self.logits[rows].to(dtype), None if self.lse is None else self.lse[rows].to(dtype))


@dataclass
class DenseTeacher:
    """p of every word from the target's last states.

    head maps [n, Ht] -> logits [n, Vd]; states [B, T, Ht]; lse fp32 [B, T] over the FULL vocabulary. lse None: the head
    covers the full vocabulary; lse and argmax are then found on the way, and a temperature is possible.
    """

    head: Callable[[Tensor], Tensor]
    states: Tensor
    lse: Tensor | None = None

    def chunk(self, positions: Tensor) -> DenseChunk:
        """positions int64 [n] into the flattened [B * T]."""
        states = self.states.flatten(0, 1)[positions]
        return DenseChunk(self.head(states), None if self.lse is None else self.lse.flatten()[positions])


@dataclass
class TopKBlock:
    """n rows of a top-k teacher: ids int64 [n, k], log_p [n, k]."""

    ids: Tensor
    log_p: Tensor

    def argmax(self) -> Tensor:
        """The target's argmax as a draft index, int64 [n]; -1 where it is outside the draft vocabulary."""
        return self.ids.gather(-1, self.log_p.argmax(-1, keepdim=True))[:, 0]

    def words(self, draft: DraftWords, temperature: float = 1.0) -> Words:
        """p given the draft, whose own shares the tail takes."""
        assert temperature == 1, "a temperature needs every word of the target, not its k likeliest"
        return SpreadWords(self.ids, self.log_p, draft)


@dataclass
class TopKTeacher:
    """p of the target's k likeliest words, exact; the tail's mass is kept (see `SpreadWords`).

    ids int64 [B, T, k]: draft indices, -1 outside the draft vocabulary, none twice in a row but -1; log_p fp32 [B, T,
    k]: FULL-vocabulary log-probabilities. The acceptance it gives is an upper bound of the true one (merging words can
    only raise the overlap of two distributions, the data processing inequality), exact where the tail is empty.
    """

    ids: Tensor
    log_p: Tensor

    def chunk(self, positions: Tensor) -> "TopKTeacher":
        """positions int64 [n] into the flattened [B * T]."""
        return TopKTeacher(self.ids.flatten(0, 1)[positions], self.log_p.flatten(0, 1)[positions])

    def block(self, rows: slice, dtype: torch.dtype) -> TopKBlock:
        """Some rows of an opened chunk."""
        return TopKBlock(self.ids[rows], self.log_p[rows].to(dtype))
