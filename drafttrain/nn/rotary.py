"""Rotary positions of a draft, with the target's theta and scaling (default, linear, llama3 and YaRN as transformers
has them).
"""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryTable:
    """cos and sin of every position, fp32 [P, D], made once and grown when a later position is asked for.

    Not a module: it holds no state that belongs in a checkpoint. Raises ValueError for a rope type outside ROPE_TYPES.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict | None, max_positions: int):
        kind = (scaling or {}).get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type is {kind!r}, expected one of {', '.join(ROPE_TYPES)}")
        config = LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        )
        rotary = LlamaRotaryEmbedding(config)
        self._inverse = rotary.inv_freq.float()
        self._scale = rotary.attention_scaling
        self._cos = self._sin = torch.empty(0, head_dim)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, T, D] in `dtype` for positions int64 [B, T]."""
        cos, sin = self.table(int(positions.max()) + 1, positions.device, dtype)
        return cos[positions][:, None], sin[positions][:, None]

    def table(self, needed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [P, D] of all positions, at least so many. A later call may make new ones."""
        if needed > len(self._cos) or self._cos.dtype != dtype or self._cos.device != device:
            enough = needed <= len(self._cos)
            count = len(self._cos) if enough else max(needed, 2 * len(self._cos), 256)
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self._inverse[None, :]
            angles = torch.cat([angles, angles], -1)
            self._cos = (angles.cos() * self._scale).to(device, dtype)
            self._sin = (angles.sin() * self._scale).to(device, dtype)
        return self._cos, self._sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the half-split layout: x [B, h, T, D], cos and sin [B, 1, T, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
