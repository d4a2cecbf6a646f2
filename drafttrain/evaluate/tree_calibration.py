"""The tree that goes with Medusa heads: hits on validation texts, what trees of a few sizes cost in the evaluator's own
loop, and the shape with the highest expected S = tau / (v(N) + c depth + o), greedy decoding, one request at a time.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.files import write_beside
from drafttrain.data.progress import progress_bar
from drafttrain.drafts.base import Batch
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.medusa import TREE_FILE, MedusaDraft, tree_text
from drafttrain.drafts.medusa_tree import ROWS, hit_table, measure_ranks, replay
from drafttrain.evaluate.cost import fit_line, interpolate
from drafttrain.evaluate.report import EvaluationError
from drafttrain.nn.tree import StaticTree
from drafttrain.nn.tree_growth import grow, grow_tree
from drafttrain.specdec.decode import generate
from drafttrain.target import Target

MOST_NODES = 32
"""Of a tree whose size is left to its cost."""
ROUNDS, REPEATS, CONTEXT = 8, 5, 128
"""Iterations of one timed text, timed texts of each tree, and tokens in front of them."""
PHASES = ("draft", "verify", "rest")


@dataclass(frozen=True)
class TreeCost:
    """Seconds of an iteration over those of a plain step, by phase. verify, rest: {nodes: v, o} at the sizes that were
    timed; draft: (a, b), a tree of depth D takes a + b D to draft.
    """

    verify: Mapping[int, float]
    rest: Mapping[int, float]
    draft: tuple[float, float]

    def __call__(self, nodes: int, depth: int) -> float:
        """Linear between the sizes that were timed."""
        drafting = self.draft[0] + self.draft[1] * depth
        return interpolate(self.verify, nodes) + drafting + interpolate(self.rest, nodes)


def calibrated(folder: Path) -> bool:
    """Whether a draft's folder has a tree."""
    return (folder / TREE_FILE).exists()


def calibrate_folders(
    folders: Sequence[Path],
    target: Target,
    batches: Iterable[Batch],
    texts: Sequence[Sequence[int]],
    nodes: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Calibrate the Medusa heads in the last of the folders and write the tree into all of them, in this order. Raises
    as `calibrate_tree`, OSError where a folder cannot be written.
    """
    draft = load_draft(folders[-1], target)
    tree, facts = calibrate_tree(draft, target, batches, texts, nodes)
    for folder in folders:
        write_beside(folder / TREE_FILE, lambda path: path.write_text(tree_text(tree, facts)))
    speedup = f", expected speedup {facts['expected_speedup']:.2f} here" if nodes is None else ""
    say(
        f"tree: {tree.nodes} nodes, {tree.depth} deep, expected acceptance length "
        f"{facts['expected_acceptance_length']:.2f}{speedup} (greedy, teacher-forced on {facts['rows']} rows)"
    )


def calibrate_tree(
    draft: MedusaDraft,
    target: Target,
    batches: Iterable[Batch],
    texts: Sequence[Sequence[int]],
    nodes: int | None = None,
) -> tuple[StaticTree, dict[str, Any]]:
    """The tree and how it was found. batches: validation data with features; texts: token ids to time behind. nodes: as
    many as that (fewer only where no more are ever accepted); None: at most `MOST_NODES`, and what each costs on this
    machine decides.

    facts: hits (nested list [heads][ranks]), rows, nodes, expected_acceptance_length (from the hits), replayed_ (on the
    very rows); without `nodes` also expected_speedup, v and o {nodes: plain steps} and draft [a, b]. Raises TreeError
    where the data has nothing to count, EvaluationError where the target has no positions to time in.
    """
    with progress_bar("tree: hits", ROWS) as update:
        ranks = measure_ranks(draft, batches, progress=update)
    hits, cost = hit_table(ranks), None
    if nodes is None:
        cost = measure_cost(draft, target, grow(hits, MOST_NODES), texts)
    grown = grow_tree(hits, nodes or MOST_NODES, cost)
    facts = {
        "nodes": grown.tree.nodes,
        "expected_acceptance_length": grown.tau,
        "replayed_acceptance_length": replay(grown.tree, ranks),
        "rows": ranks.rank.shape[1],
        "hits": hits,
    }
    if cost is not None:
        facts |= {"expected_speedup": grown.speedup, "v": cost.verify, "o": cost.rest, "draft": cost.draft}
    return grown.tree, facts


def timed_sizes(most: int) -> list[int]:
    """1, 2, 4, .. and the largest."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def measure_cost(
    draft: MedusaDraft,
    target: Target,
    order: Sequence[tuple[tuple[int, ...], float]],
    texts: Sequence[Sequence[int]],
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
) -> TreeCost:
    """Times trees of the first 1, 2, 4, .. nodes of `order` (nn.tree_growth.grow) in the loop against plain decoding,
    interleaved in an order shuffled anew for each repeat, because machines drift.

    What a round costs hangs on its shape, hardly on what is accepted, so any texts do: the longest are taken. Raises
    EvaluationError where the target's positions do not suffice.
    """
    trees: dict[int, StaticTree | None] = {0: None}
    trees |= {n: StaticTree.from_paths([path for path, _ in order[:n]]) for n in timed_sizes(len(order))}
    makes = {n: None if tree is None else draft.proposer(target, tree) for n, tree in trees.items()}
    new = {n: 2 + math.ceil(rounds * (1 + sum(value for _, value in order[:n]))) for n in trees}
    prompts = _prompts(target, texts, max(new.values()), repeats)
    spent: dict[int, list[dict[str, float]]] = {n: [] for n in trees}
    rng, done = random.Random(0), 0
    with progress_bar("tree: timing", (repeats + 1) * len(trees)) as update:
        for repeat in range(repeats + 1):
            for n in rng.sample(sorted(trees), len(trees)):
                depth = 1 if trees[n] is None else trees[n].depth
                count = new[n] if repeat else 3  # The first is to warm up.
                prompt = prompts[repeat % len(prompts)]
                text = generate(target, [prompt], makes[n], k=depth, max_new_tokens=count, stop_ids=())
                if repeat:
                    spent[n].append({phase: getattr(text.seconds, phase) / text.rounds for phase in PHASES})
                done += 1
                update(done)
    return cost_of(spent, {n: tree.depth for n, tree in trees.items() if tree is not None})


def cost_of(spent: Mapping[int, Sequence[Mapping[str, float]]], depths: Mapping[int, int]) -> TreeCost:
    """The cost from seconds an iteration by phase, {nodes: one dict for each repeat}; 0: plain decoding. depths: of the
    trees, by their nodes.

    The least of the repeats is taken, since what else a machine is busy with only adds; medians that were taken under
    load chose trees by chance. For the same reason v and o are kept from falling with the nodes.
    """
    least = {n: {phase: min(one[phase] for one in times) for phase in PHASES} for n, times in spent.items()}
    step = least[0]["verify"] + least[0]["rest"]
    verify, rest, draft = ({n: least[n][phase] / step for n in depths} for phase in ("verify", "rest", "draft"))
    levels = {
        depth: statistics.mean(draft[n] for n, own in depths.items() if own == depth) for depth in set(depths.values())
    }
    a, b = fit_line(levels)
    return TreeCost(rising(verify), rising(rest), (a, b) if b > 0 else (statistics.mean(levels.values()), 0.0))


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """The nearest values that never fall, in the least-squares sense: neighbours that do are pooled."""
    pools: list[list[float]] = []
    for x in sorted(points):
        pools.append([points[x]])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    values = [statistics.fmean(pool) for pool in pools for _ in pool]
    return dict(zip(sorted(points), values, strict=True))


def _prompts(target: Target, texts: Sequence[Sequence[int]], new: int, count: int) -> list[list[int]]:
    """The starts of the `count` longest texts, `CONTEXT` tokens of each or as many as leave room for the new ones."""
    length = min(CONTEXT, target.max_positions - new)
    if length < 1:
        raise EvaluationError(
            f"{target.title} takes {target.max_positions} positions; timing its trees needs {new} and a prompt. Mend: "
            "draft.tree_nodes: a number of nodes, which needs no timing"
        )
    return [list(text[:length]) for text in sorted(texts, key=len, reverse=True)[:count]]
