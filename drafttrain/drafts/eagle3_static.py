"""The EAGLE-3 layers and head over fixed numbers of rows and nodes, captured as CUDA graphs (nn/graphs.py)."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.nn.cache import RaggedCache, visible, visible_tree
from drafttrain.nn.graphs import SMALLEST, Captured, padded, rounded, sizes


def run_layer(
    draft, cache: RaggedCache, tokens: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """The draft's layers over n new rows behind an open cache: tokens [B, n], hidden [B, n, H] -> hidden [B, n, H].

    rotary: cos and sin [B, 1, n, D]; mask bool [B, 1, n, columns], None where every row sees all.
    """

    def attend(layer, query, key, value):
        key, value = cache.update(key, value, layer)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

    return draft.advance(tokens, hidden, *rotary, attend)


class StaticDraft:
    """The steps of one draft and batch size, with the cache they work on. Each graph has memory of its own, because
    what one gives is read after others have run.
    """

    def __init__(self, draft, batch: int, smallest: int = SMALLEST):
        self.draft, self.batch, self.smallest = draft, batch, smallest
        self.cache = RaggedCache(batch, capacity=0, fixed=True)
        self.width = 1
        self._graphs: dict[tuple, Captured] = {}
        self._prepared: set[tuple[int, int]] = set()

    def prepare(self, room: int, k: int) -> Iterator[int]:
        """Make room for so many committed tokens and for k drafts a round. Yields committed lengths from which a round
        takes steps that were not captured yet.
        """
        self.width = k + 1
        self._grow(room)
        start = 1
        for columns in sizes(self.smallest):
            if (columns, k) not in self._prepared:
                self._prepared.add((columns, k))
                yield start
            if columns >= self.cache.capacity:
                return
            start = columns  # Whatever is added needs the next size.

    def no_hidden(self) -> Tensor:
        """Zeros [B, 1, H]."""
        weight = self.draft.fc.weight
        return weight.new_zeros(self.batch, 1, len(weight))

    def no_features(self) -> Tensor:
        """Zeros fp32 [B, 1, A*Ht]: features of every dtype fit in, and are divided by their rms in fp32 anyway."""
        weight = self.draft.fc.weight
        return weight.new_zeros(self.batch, 1, weight.shape[1], dtype=torch.float32)

    def commit(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Rows with the target's features [B, n, A*Ht] for up to k + 1 tokens [B, n] -> hidden [B, n, H]. Its rows and
        those of `run` and `logits` are overwritten by the next call of the same kind and size.
        """
        n = tokens.shape[1]
        slots = self.cache.lengths[:, None] + torch.arange(self.width)
        inputs = padded(tokens, self.width), padded(features, self.width), self.cache.lengths, slots
        return self._call(("commit", self.width), *inputs)[:, :n]

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor | None, family: Tensor | None, depth) -> Tensor:
        """As Eagle3Proposer._run."""
        n = tokens.shape[1]
        if positions is None:
            positions = self.cache.lengths[:, None] + torch.arange(n)
        inputs = tokens, hidden, self.cache.lengths, positions
        if family is None:
            return self._call(("chain", n), *inputs)
        return self._call(("tree", n, family.shape[2]), *inputs, family, depth)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, .., H] -> logits [B, .., Vd]."""
        key = ("head", *hidden.shape[1:])
        if key not in self._graphs:
            self._graphs[key] = Captured(lambda given: (self.draft.head(given),), self.batch)
        return self._graphs[key](hidden.device, hidden)[0]

    def _call(self, kind: tuple, tokens: Tensor, hidden: Tensor, *rest: Tensor) -> Tensor:
        needed = int(self.cache.lengths.max()) + tokens.shape[1]
        self._grow(needed)
        key = (*kind, rounded(needed, self.smallest))
        if key not in self._graphs:
            self._graphs[key] = Captured(self._function(*key), self.batch)
        return self._graphs[key](self.draft.fc.weight.device, tokens, hidden, *rest)[0]

    def _function(self, kind: str, n: int, *more: int) -> Callable:
        draft, cache, columns, window = self.draft, self.cache, more[-1], self.draft.shape.sliding_window
        cos, sin = draft.rotary_table(cache.capacity)
        ahead = torch.arange(n, device=cos.device)

        def run(tokens, hidden, committed, positions, family=None, depth=None):
            slots = committed[:, None] + ahead
            if family is None:
                mask = visible(slots, columns, window)
            else:
                mask = visible_tree(committed + n - family.shape[2], family, columns, window, depth)
            cache.open(slots, columns)
            hidden = draft.fuse(hidden) if kind == "commit" else hidden
            rotary = cos[positions][:, None], sin[positions][:, None]
            return (run_layer(draft, cache, tokens, hidden, rotary, mask),)

        return run

    def _grow(self, columns: int) -> None:
        if columns > self.cache.capacity:
            self.cache.capacity = rounded(columns, self.smallest)
            self._graphs.clear()  # They hold the old buffers' addresses.
            self._prepared.clear()
