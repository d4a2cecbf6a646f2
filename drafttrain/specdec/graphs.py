"""The target's decoding and verifying steps in static form, captured as CUDA graphs: with and without a draft. EAGLE-3
drafts are captured alike (drafts/eagle3_static.py); a small model's own steps are not.

A step has fixed numbers of rows and tokens, writes at positions given as a tensor and attends over a fixed number of
key columns, of which the masks hide what is not there.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafttrain.nn.cache import RaggedCache, visible, visible_tree
from drafttrain.nn.graphs import SMALLEST, Captured, Pool, padded, rounded
from drafttrain.nn.tree import ancestors, deepest, depths
from drafttrain.target import Target, TargetStep

CAPTURED = "cuda graphs"
KEPT = 4
"""Batch sizes whose captured steps and caches a target keeps for the next decoding."""


def capture_note(target: Target) -> str:
    """For reports: "cuda graphs" where a target's steps are captured, or "none: " and why not."""
    if target.device.type != "cuda":
        return f"none: {target.device.type}"
    if target.shards is not None:
        return "none: the target's layers are spread over processes"
    if target.spread:
        return "none: the target is spread over several devices"
    values = target.model.config.to_dict()
    if "quantization_config" in values:
        return "none: the target's weights are quantised"
    model = type(target.model)
    if not model._can_compile_fullgraph:
        return f"none: transformers' {model.__name__} decides on its data as it runs"
    if model._can_set_experts_implementation() and target.config._experts_implementation == "eager":
        return "none: the target's experts run one by one"
    ropes = target.config.to_dict().get("rope_parameters") or {}
    if target.scaled_from is not None:
        return "none: the target scales its attention by a number of tokens that transformers counts as it runs"
    if "dynamic" in {ropes.get("rope_type"), *(v.get("rope_type") for v in ropes.values() if isinstance(v, dict))}:
        return "none: the target's rotary positions change with the length"
    return CAPTURED


class StaticSteps:
    """Stands in for `Target.step` after the prefill, over the rows of one cache.

    batch B: the rows that every step runs; those that have left the batch run on unseen. `smallest`: the fewest key
    columns of a step (nn/graphs.rounded).
    """

    def __init__(self, target: Target, batch: int, smallest: int = SMALLEST):
        self.target, self.smallest = target, smallest
        self.cache = RaggedCache(batch, capacity=0, fixed=True)
        self._pool = Pool(target.device)
        self._steps: dict[tuple, Captured] = {}
        self._moves: dict[int, Captured] = {}

    @classmethod
    def of(cls, target: Target, batch: int) -> "StaticSteps":
        """Those the target keeps for this batch size, new ones the first time."""
        found = target.captured.pop(batch, None) or cls(target, batch)
        target.captured[batch] = found  # The latest last.
        for oldest in list(target.captured)[:-KEPT]:
            del target.captured[oldest]
        return found

    def begin(self, room: int) -> RaggedCache:
        """The cache, empty, with at least so many columns: prefill it, then `step`. Former contents are gone."""
        self._grow(room)
        self.cache.reset()
        return self.cache

    def prepare(self, count: int, layers: Sequence[int] = (), tree: bool = False) -> bool:
        """Capture the next step, of `count` tokens a row, unless that was done; says whether it was done now."""
        self._grow(int(self.cache.lengths.max()) + count)
        key = self._key(count, layers, tree)
        if key in self._steps:
            return False
        B = self.cache.batch
        self._steps[key] = Captured(self._function(*key), B, self._pool)
        inputs = [torch.zeros(B, count, dtype=torch.long), padded(self.cache.lengths[None], B)[0]]
        if tree:
            inputs += _family(torch.full((B, count - 1), -1))
        self._steps[key](self.target.device, *inputs)
        return True

    def step(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        lengths: Tensor | None = None,
        layers: Sequence[int] = (),
        parents: Tensor | None = None,
        width: int | None = None,
    ) -> TargetStep:
        """As `Target.step`, which see; `cache` must be `begin`'s. width: as many tokens a row are run (a tree's nodes
        and the root, say), so that steps of different sizes share a graph.

        logits, features and last_hidden are overwritten by the next step.
        """
        assert cache is self.cache, "the cache must be the one that begin gave"
        B, N = tokens.shape
        width = max(width or N, N)
        lengths = torch.full((B,), N) if lengths is None else lengths
        inputs = [padded(tokens, width), cache.lengths]
        if parents is None:
            reach, offsets = lengths, torch.arange(N)
        else:
            family, depth = _family(padded(parents, width - 1, -1))
            inputs += [family, depth]
            offsets = depth[:, :N]
            reach = deepest(offsets, lengths) + 1
        self.target.check_positions(int((cache.lengths + reach).max()))
        self.prepare(width, layers, parents is not None)
        run = self._steps[self._key(width, layers, parents is not None)]
        outputs = run(self.target.device, *inputs)
        logits, features, last_hidden = (None if out is None else out[:, :N] for out in outputs)
        return TargetStep(tokens, cache.lengths[:, None] + offsets, lengths, logits, features, last_hidden)

    def gather(self, path: Tensor) -> None:
        """As `RaggedCache.gather`, in one launch."""
        width = -(-path.shape[1] // 8) * 8
        moves = self.cache.moves(padded(path, width, -1))
        if moves is None:
            return
        if width not in self._moves:
            self._moves[width] = Captured(self._moved, self.cache.batch)
            nowhere = torch.zeros(self.cache.batch, width, dtype=torch.long)
            self._moves[width](self.target.device, nowhere, nowhere)  # Capturing runs it more than once.
        self._moves[width](self.target.device, *moves)

    def _moved(self, source: Tensor, goal: Tensor) -> tuple[Tensor | None, ...]:
        self.cache.move(source, goal)
        return ()

    def _grow(self, columns: int) -> None:
        if columns > self.cache.capacity:
            self.cache.capacity = rounded(columns, self.smallest)
            self._steps.clear()  # They hold the old buffers' addresses.
            self._pool = Pool(self.target.device)
            self._moves.clear()

    def _key(self, count: int, layers: Sequence[int], tree: bool) -> tuple[int, tuple[int, ...], bool, int]:
        return count, tuple(layers), tree, rounded(int(self.cache.lengths.max()) + count, self.smallest)

    def _function(self, count: int, layers: tuple[int, ...], tree: bool, columns: int) -> Callable:
        target, cache = self.target, self.cache
        ahead = torch.arange(count, device=target.device)

        def run(tokens, committed, family=None, depth=None):
            slots = committed[:, None] + ahead
            if tree:
                positions = committed[:, None] + depth
                masks = target.masks(lambda **limits: visible_tree(committed, family, columns, depth=depth, **limits))
            else:
                positions, masks = slots, target.masks(lambda **limits: visible(slots, columns, **limits))
            cache.open(slots, columns)
            return target.forward(tokens, positions, masks, cache, layers)

        return run


def _family(parents: Tensor) -> list[Tensor]:
    """Of a tree's nodes [B, N] and the root: who sees whom bool [B, N+1, N+1] and the depths int64 [B, N+1]."""
    depth = torch.cat([torch.zeros(len(parents), 1, dtype=torch.long), depths(parents)], 1)
    return [ancestors(parents), depth]
