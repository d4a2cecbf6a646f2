"""A KV cache with one length for each row: entries are written at given positions, and rolling back is setting a
length.

transformers models take `RaggedCache` as their `cache` together with prepared masks (`visible`), also those with
sliding windows: every layer keeps all entries, the window lives in the mask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache


class RaggedCache(Cache):
    """Keys and values [B, nkv, S, D] of every layer, allocated at the first write and grown in steps.

    `lengths` (int64 [B], CPU) counts the committed entries of each row. A forward writes behind them (`begin`), and
    nothing is committed until the caller raises `lengths`; what lies beyond is invisible to the masks and overwritten
    by the next forward. fixed: the buffers keep all rows and their place in memory, as captured steps need it (`open`).
    """

    def __init__(self, batch: int, capacity: int = 256, fixed: bool = False):
        self.layers = []
        self.lengths = torch.zeros(batch, dtype=torch.long)
        self.batch, self.capacity, self.fixed = batch, capacity, fixed
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._start = 0
        self._end = 0
        self._positions: Tensor | None = None

    def begin(self, count: int) -> Tensor:
        """Open a forward over `count` new tokens a row; returns their positions int64 [B, count]."""
        positions = self.lengths[:, None] + torch.arange(count)
        self._start, self._end = int(positions[0, 0]), int(positions.max()) + 1
        uniform = bool((self.lengths == self.lengths[0]).all())
        self._positions = None if uniform else positions
        if self._end > self.capacity:
            self.capacity = max(self._end, self.capacity * 2)
        return positions

    def open(self, slots: Tensor, key_count: int) -> None:
        """Open a forward that writes at slots int64 [B, N], on the device, and sees so many columns of every row: no
        shape hangs on `lengths`, which are not looked at.
        """
        self._positions, self._end = slots, key_count

    def reset(self) -> None:
        """Empty, with all rows, and zeros in the buffers that are there: a masked NaN still spoils a matrix product."""
        self.lengths = torch.zeros(self.batch, dtype=torch.long)
        for store in (self._keys, self._values):
            for buffer in store.values():
                buffer.zero_()

    @property
    def key_count(self) -> int:
        """How many key columns the forward that is open sees (committed and new, over all rows)."""
        return self._end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write [B, nkv, N, D] of the open forward; returns keys and values [B, nkv, key_count, D]."""
        keys = self._keys[layer_idx] = self._room(self._keys.get(layer_idx), key_states)
        values = self._values[layer_idx] = self._room(self._values.get(layer_idx), value_states)
        if self._positions is None:
            end = self._start + key_states.shape[2]
            keys[:, :, self._start : end] = key_states
            values[:, :, self._start : end] = value_states
        else:
            positions = self._positions.to(keys.device)
            rows = torch.arange(len(positions), device=keys.device)[:, None]
            keys[rows, :, positions] = key_states.transpose(1, 2)
            values[rows, :, positions] = value_states.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def _room(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        if buffer is not None and buffer.shape[2] >= self.capacity:
            return buffer
        # Zeros, not uninitialised memory: a masked NaN still spoils a matrix product.
        grown = new.new_zeros(new.shape[0], new.shape[1], self.capacity, new.shape[3])
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown

    def gather(self, path: Tensor) -> None:
        """Move the entries of an accepted tree path to where a chain's would lie: path int64 [B, D] counts slots behind
        each row's committed entries, strictly rising, -1 padded. Raise `lengths` afterwards.
        """
        moves = self.moves(path)
        if moves is not None:
            self.move(*moves)

    def moves(self, path: Tensor) -> tuple[Tensor, Tensor] | None:
        """(from, to) int64 [B, D] each, the columns that `gather` copies; None where all lie in their place."""
        straight = torch.arange(path.shape[1])
        if bool(((path == straight) | (path < 0)).all()):
            return None
        source = self.lengths[:, None] + torch.where(path < 0, straight, path)
        goal = self.lengths[:, None] + straight
        return source.clamp_max(self.capacity - 1), goal.clamp_max(self.capacity - 1)

    def move(self, source: Tensor, goal: Tensor) -> None:
        """Copy columns [B, D] of every row and layer."""
        placed: dict[torch.device, tuple[Tensor, ...]] = {}
        for store in (self._keys, self._values):
            for buffer in store.values():
                if buffer.device not in placed:
                    rows = torch.arange(len(source), device=buffer.device)[:, None]
                    placed[buffer.device] = rows, source.to(buffer.device), goal.to(buffer.device)
                rows, here, there = placed[buffer.device]
                # Indexing copies, so that a slot is read before it is overwritten.
                buffer[rows, :, there] = buffer[rows, :, here]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        self.lengths = self.lengths[index]
        for store in (self._keys, self._values):
            for layer, buffer in store.items():
                kept = buffer[index.to(buffer.device)]
                if self.fixed:
                    buffer[: len(kept)] = kept
                else:
                    store[layer] = kept

    def entries(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values [nkv, length, D] of one row."""
        length = int(self.lengths[row])
        return self._keys[layer][row, :, :length], self._values[layer][row, :, :length]

    def get_seq_length(self, layer_idx: int = 0, *args, **kwargs) -> int:
        return int(self.lengths.max())

    def __len__(self) -> int:
        return len(self._keys)


def visible(positions: Tensor, key_count: int, window: int | None = None, chunk: int | None = None) -> Tensor:
    """Causal mask bool [B, 1, N, key_count]: key j is visible to a query at position i iff j <= i (and i - j < window;
    and j lies in the same chunk of so many positions as i, Llama 4's chunked attention).
    """
    keys = torch.arange(key_count, device=positions.device)
    query = positions[:, None, :, None]
    mask = keys <= query
    if window is not None:
        mask &= query - keys < window
    if chunk is not None:
        mask &= query // chunk == keys // chunk
    return mask


def visible_tree(
    lengths: Tensor,
    family: Tensor,
    key_count: int,
    window: int | None = None,
    depth: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The mask bool [B, 1, Q, key_count] of the last Q of n new entries that form a tree behind `lengths` [B] committed
    ones.

    family bool [B, Q, n]: which new entries each query sees (nn/tree.py). window, chunk: as in `visible`, by
    positions; they need depth int64 [B, n], an entry's position less the length.
    """
    count = family.shape[2]
    keys = torch.arange(key_count, device=lengths.device)
    slot = keys[None, :] - lengths[:, None]  # [B, S]; below 0: committed
    new = slot.clamp(0, count - 1)
    seen = family.gather(2, new[:, None, :].expand(-1, family.shape[1], -1))
    mask = torch.where(((slot >= 0) & (slot < count))[:, None], seen, (slot < 0)[:, None])
    if window is None and chunk is None:
        return mask[:, None]
    positions = torch.where(slot < 0, keys, lengths[:, None] + depth.gather(1, new))[:, None, :]
    query = (lengths[:, None] + depth[:, count - family.shape[1] :])[:, :, None]
    if window is not None:
        mask &= query - positions < window
    if chunk is not None:
        mask &= query // chunk == positions // chunk
    return mask[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask as a term added to scores: 0 where visible, the dtype's lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
