"""The decoder layers of an EAGLE-3 draft: the first reads embedding and fused feature side by side, further ones are
plain.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.nn.rotary import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, nh, T, D], key, value [B, nkv, T, D]) -> output [B, nh, T, D]: the one thing that training and
serving do apart.
"""


class RMSNorm(nn.Module):
    """x * weight / rms(x), in fp32 inside."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


class Attention(nn.Module):
    """q, k, v projections of x [B, T, width] and the output projection to [B, T, H]."""

    def __init__(self, config: Eagle3Config, width: int, layer: int):
        super().__init__()
        self.head_dim, self.layer = config.head_dim, layer
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(self.layer, rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The first layer: attention over [norm(embedding) ; norm(hidden)], the residual is the hidden state."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size, 0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """embedded, hidden [B, T, H] -> hidden [B, T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = residual + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DeeperLayer(nn.Module):
    """A layer behind the first, as Llama has them: it sees hidden states alone."""

    def __init__(self, config: Eagle3Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> hidden [B, T, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
