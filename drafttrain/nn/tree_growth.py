"""The shape of a static draft tree from how often each head's likeliest words are right: greedy growth (Medusa, arXiv
2401.10774, section 2.3.3), up to the size that pays.

hits[i][r]: how often the target's choice at depth i + 1 is the r-th likeliest word of head i. A node with the ranks
(r_0, .., r_d) is accepted as often as the product of hits[j][r_j] says, and tau = 1 + the sum over all nodes.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from drafttrain.nn.tree import StaticTree, TreeError

Hits = Sequence[Sequence[float]]
Path = tuple[int, ...]
Cost = Callable[[int, int], float]
"""(nodes, depth) of a tree -> seconds of its iteration over those of a plain step."""


@dataclass(frozen=True)
class Grown:
    """A tree with its expected acceptance length tau; speedup: tau over the cost, None where no cost was given."""

    tree: StaticTree
    tau: float
    speedup: float | None


def grow_tree(hits: Hits, nodes: int, cost: Cost | None = None) -> Grown:
    """The tree of at most `nodes` nodes with the highest tau, or with the highest tau / cost(nodes, depth).

    A deeper level costs a pass of the draft that a sibling does not, so with a cost the growth is done for every limit
    of the depth, and the best size of each compared; equals go to the smaller. Raises TreeError for nodes < 1 and for
    what is no table of hits.
    """
    if cost is None:
        order = grow(hits, nodes)
        return Grown(_shape(order), _taus(order)[-1], None)
    _check(hits, nodes)
    found = []
    for limit in range(1, len(hits) + 1):
        order = grow(hits[:limit], nodes)
        deepest = accumulate((len(path) for path, _ in order), max)
        for n, (depth, tau) in enumerate(zip(deepest, _taus(order), strict=True), 1):
            found.append((tau / cost(n, depth), tau, order[:n]))
    speedup, tau, order = max(found, key=lambda one: (one[0], -len(one[2])))
    return Grown(_shape(order), tau, speedup)


def grow(hits: Hits, nodes: int) -> list[tuple[Path, float]]:
    """(rank path, how often it is accepted) of up to `nodes` nodes, the likeliest first among those whose parent and
    lower sibling are in the tree; equals go to the shallower.

    While no row of hits rises, every prefix has the highest tau of all trees of its size: a node is never likelier
    than its parent and its lower sibling. Nodes that are never accepted, nor any behind them, are left out, the first
    one apart. Raises as `grow_tree`.
    """
    _check(hits, nodes)
    out: list[tuple[Path, float]] = []
    frontier: list[tuple[float, int, Path]] = [(-hits[0][0], 1, (0,))]
    while frontier and len(out) < nodes:
        negative, _, path = heapq.heappop(frontier)
        out.append((path, -negative))
        for parent, rank in ((path[:-1], path[-1] + 1), (path, 0)):
            if len(parent) < len(hits) and any(hits[len(parent)][rank:]):
                above = math.prod(hits[i][r] for i, r in enumerate(parent))
                if above > 0:
                    heapq.heappush(frontier, (-above * hits[len(parent)][rank], len(parent) + 1, (*parent, rank)))
    while len(out) > 1 and not out[-1][1]:
        out.pop()
    return out


def _taus(order: Sequence[tuple[Path, float]]) -> list[float]:
    """tau of the first 1, 2, .. nodes."""
    return list(accumulate((value for _, value in order), initial=1.0))[1:]


def _shape(order: Sequence[tuple[Path, float]]) -> StaticTree:
    return StaticTree.from_paths([path for path, _ in order])


def _check(hits: Hits, nodes: int) -> None:
    if nodes < 1:
        raise TreeError(f"a tree of {nodes} nodes was asked for; expected at least 1. Mend: draft.tree_nodes from 1 on")
    rows = [sum(row) for row in hits if len(row) and all(0 <= hit <= 1 for hit in row)]
    if not hits or len(rows) < len(hits) or max(rows) > 1 + 1e-6:
        raise TreeError(
            f"{[list(row) for row in hits]} is no table of hits; expected a row for each head, of shares from 0 to 1 "
            "that add up to at most 1. Mend: measure it again"
        )
