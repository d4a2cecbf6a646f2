"""Trees of drafted tokens: their shapes, who is whose ancestor, and which nodes a depth or a budget leaves.

A tree is a list of parents in breadth-first order; -1 is the root, the last committed token, which is no node itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafttrain.errors import UserError


class TreeError(UserError):
    """A tree that cannot be drafted: no nodes, a parent that does not exist, or a file that holds no tree."""


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape (Medusa, arXiv 2401.10774, section 2.1.2): `parents` in breadth-first order, siblings by rank.

    The j-th child of a node is its j-th likeliest token, or the j-th draw without replacement.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        ordered = all(-1 <= parent < i for i, parent in enumerate(self.parents))
        if not self.parents or not ordered or list(self.parents) != sorted(self.parents):
            raise TreeError(
                f"the tree's parents are {list(self.parents)}; expected at least one node, breadth-first: parents that "
                "never fall, each -1 (the root) or an earlier node"
            )

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "StaticTree":
        """From rank paths, as Medusa's tree choices are written: [[0], [1], [0, 0]] has two children of the root and
        one of its first child. Prefixes and lower ranks must be listed too; the order is free.
        """
        wanted = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): -1}
        for path in wanted:
            before = (*path[:-1], path[-1] - 1) if path and path[-1] > 0 else path[:-1]  # Lower rank, or the prefix.
            if not path or min(path) < 0 or before not in index:
                raise TreeError(
                    f"the tree has the path {list(path)} but not what comes before it; expected every prefix and every "
                    "lower rank, e.g. [[0], [1], [0, 0]]"
                )
            index[path] = len(index) - 1
        return cls(tuple(index[path[:-1]] for path in wanted))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 1 for the root's children."""
        out: list[int] = []
        for parent in self.parents:
            out.append(1 if parent < 0 else out[parent] + 1)
        return tuple(out)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Which child of its parent each node is, from 0."""
        return tuple(self.parents[:i].count(parent) for i, parent in enumerate(self.parents))

    def paths(self) -> list[list[int]]:
        """Rank paths, the inverse of `from_paths`."""
        out: list[list[int]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            out.append([*(out[parent] if parent >= 0 else []), rank])
        return out

    def lineage(self, node: int) -> list[int]:
        """The nodes from a child of the root down to the node itself; empty for the root, -1."""
        out: list[int] = []
        while node >= 0:
            out.insert(0, node)
            node = self.parents[node]
        return out

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    def count(self, depth: int) -> int:
        """Nodes down to a depth."""
        return sum(own <= depth for own in self.depths)

    def described(self) -> dict:
        """As in report.json."""
        return {"kind": "static", "parents": list(self.parents)}

    def __str__(self) -> str:
        return f"static tree of {self.nodes}"


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): at each depth the `topk` likeliest nodes by the product of draft
    probabilities along their path are expanded into `topk` children each; of all, the `nodes` likeliest are verified,
    ties going to the shallower. Depth is the round's k.
    """

    topk: int
    nodes: int

    def __post_init__(self):
        if self.topk < 1 or self.nodes < 1:
            raise TreeError(f"the tree has topk {self.topk} and nodes {self.nodes}; expected at least 1 of each")

    def count(self, depth: int) -> int:
        """The most nodes that are verified at a depth."""
        return min(self.nodes, self.topk + max(depth - 1, 0) * self.topk**2)

    def described(self) -> dict:
        """As in report.json."""
        return {"kind": "dynamic", "topk": self.topk, "nodes": self.nodes}

    def __str__(self) -> str:
        return f"tree {self.topk}x{self.nodes}"


Tree = StaticTree | DynamicTree


def depths(parents: Tensor) -> Tensor:
    """int64 [B, N] parents -> depth of each node [B, N], 1 for a child of the root."""
    out = torch.zeros(parents.shape[0], parents.shape[1] + 1, dtype=torch.long, device=parents.device)
    for i in range(parents.shape[1]):  # Column 0 is the root.
        out[:, i + 1] = out.gather(1, parents[:, i : i + 1] + 1)[:, 0] + 1
    return out[:, 1:]


def deepest(depth: Tensor, lengths: Tensor) -> Tensor:
    """int64 [B]: the largest depth [B, N] among each row's first `lengths` [B] columns; what lies behind is padding."""
    return depth.masked_fill(torch.arange(depth.shape[1]) >= lengths[:, None], 0).amax(1)


def ancestors(parents: Tensor) -> Tensor:
    """int64 [B, N] parents -> bool [B, N+1, N+1]: row i sees column j iff j is i or an ancestor of it. Column 0: root.

    For a chain this is the causal mask.
    """
    B, N = parents.shape
    out = torch.eye(N + 1, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    rows = torch.arange(B, device=parents.device)
    for i in range(N):
        out[:, i + 1] |= out[rows, parents[:, i] + 1]
    return out


def chain_parents(batch: int, count: int) -> Tensor:
    """The parents [B, N] of a chain: -1, 0, 1, .."""
    return torch.arange(-1, count - 1).expand(batch, count)
