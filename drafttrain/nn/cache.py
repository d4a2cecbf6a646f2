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
    by the next forward.
    """

    def __init__(self, batch: int, capacity: int = 256):
        self.layers = []
        self.lengths = torch.zeros(batch, dtype=torch.long)
        self.capacity = capacity
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
            rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
            positions = self._positions.to(keys.device)
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

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        self.lengths = self.lengths[index]
        for store in (self._keys, self._values):
            for layer, buffer in store.items():
                store[layer] = buffer[index.to(buffer.device)]

    def entries(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """The committed keys and values [nkv, length, D] of one row."""
        length = int(self.lengths[row])
        return self._keys[layer][row, :, :length], self._values[layer][row, :, :length]

    def get_seq_length(self, layer_idx: int = 0, *args, **kwargs) -> int:
        return int(self.lengths.max())

    def __len__(self) -> int:
        return len(self._keys)


def visible(positions: Tensor, key_count: int, window: int | None = None) -> Tensor:
    """Causal mask bool [B, 1, N, key_count]: key j is visible to a query at position i iff j <= i (and i - j <
    window).
    """
    keys = torch.arange(key_count, device=positions.device)
    query = positions[:, None, :, None]
    mask = keys <= query
    if window is not None:
        mask &= query - keys < window
    return mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask as a term added to scores: 0 where visible, the dtype's lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
