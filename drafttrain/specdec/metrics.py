"""Counts of speculative decoding and the rates made of them, always pooled over iterations, never means of means."""

from dataclasses import dataclass, field
from typing import Self


@dataclass
class Counts:
    """What happened in a number of iterations (an iteration: one target forward after the prefill, for one row).

    iterations; draft_rounds: those with at least one draft (vLLM's num_drafts); drafted, accepted: draft tokens (of a
    tree: nodes); emitted: tokens delivered, the prefill's included; reached[i]: iterations in which the first i + 1
    drafts were all accepted (of a tree: nodes down to depth i + 1); lengths[j]: iterations that drafted j tokens deep;
    tree: whether any of them drafted a tree.
    """

    iterations: int = 0
    draft_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tree: bool = False

    def add_round(self, drafted: int, accepted: int, depth: int | None = None) -> None:
        """Count one iteration of one row; depth: of the tree that it drafted, None for a chain."""
        self.tree |= depth is not None
        depth = drafted if depth is None else depth
        self.iterations += 1
        self.draft_rounds += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.reached.extend([0] * (depth - len(self.reached)))
        for i in range(accepted):
            self.reached[i] += 1
        self.lengths.extend([0] * (depth + 1 - len(self.lengths)))
        self.lengths[depth] += 1

    def add(self, other: "Counts") -> Self:
        """Pool another count into this one."""
        self.iterations += other.iterations
        self.draft_rounds += other.draft_rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.tree |= other.tree
        for mine, theirs in ((self.reached, other.reached), (self.lengths, other.lengths)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count
        return self

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None when nothing was drafted, and for trees, where it says nothing."""
        return self.accepted / self.drafted if self.drafted and not self.tree else None

    @property
    def mean_acceptance_length(self) -> float:
        """tau = 1 + accepted / iterations: the tokens of one iteration, the bonus or replacement included."""
        return 1 + self.accepted / self.iterations if self.iterations else 1.0

    @property
    def per_position_acceptance(self) -> list[float]:
        """At position i: iterations whose first i + 1 drafts were all accepted / iterations. Joint: it never rises
        with i.
        """
        return [count / self.iterations for count in self.reached] if self.iterations else []

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """per_position[i] / per_position[i - 1]: the chance of position i given that the one before was accepted."""
        before = [self.iterations, *self.reached]
        return [now / prior if prior else None for now, prior in zip(self.reached, before, strict=False)]


def repeated_ngram_share(texts: list[list[int]], n: int = 8) -> float:
    """Share of positions that end an n-gram already seen earlier in the same sequence, over all sequences (0 when too
    short).
    """
    repeated = total = 0
    for tokens in texts:
        seen: set[tuple[int, ...]] = set()
        for end in range(n, len(tokens) + 1):
            gram = tuple(tokens[end - n : end])
            repeated += gram in seen
            seen.add(gram)
            total += 1
    return repeated / total if total else 0.0
