"""The head of a frozen target: its own final norm, chosen rows, and what its config does to the logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.target_files import TargetError

FEW_ROWS = 64
"""Up to here a product in float32 takes as long as reading the head's weights, if they are read once."""


class TargetHead:
    """Final norm, chosen head rows, then logit scale or soft-cap, of a frozen target.

    norm: the model's own final norm; weight [R, Ht]; bias [R] or None; softcap c: c * tanh(z / c); scale: z * scale;
    normed: hidden states given to __call__ have the final norm behind them already. Tensors are plain attributes: they
    enter no state dict, optimizer or DDP when a draft holds the head."""

    def __init__(
        self,
        norm: nn.Module,
        weight: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        normed: bool = False,
    ):
        self.norm, self.weight, self.bias = norm, weight, bias
        self.softcap, self.scale, self.input_normed = softcap, scale, normed

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [.., Ht] -> logits [.., R] in the weight's dtype."""
        return self.logits(hidden if self.input_normed else self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm alone: [.., Ht] -> [.., Ht] in the weight's dtype."""
        return self.norm(hidden.to(self.weight.device, self.weight.dtype))

    def logits(self, normed: Tensor) -> Tensor:
        """The rest: normed [.., Ht] -> logits [.., R]. Flat and contiguous first: a bf16 input with odd strides, even
        of a dimension of size 1, takes a path many times slower into a head of 262k rows on CPUs. There float32 of a
        few rows is multiplied from the left: the weights are then read once, and not once for each row."""
        flat = (
            normed.to(self.weight.device, self.weight.dtype)
            .reshape(normed.shape[:-1].numel(), normed.shape[-1])
            .contiguous()
        )
        plain = type(self.weight) in (Tensor, nn.Parameter)  # Not packed to fewer bits, which are for F.linear alone.
        if plain and flat.device.type == "cpu" and flat.dtype == torch.float32 and 1 < len(flat) <= FEW_ROWS:
            logits = (self.weight @ flat.T).T.contiguous()
            logits = logits if self.bias is None else logits + self.bias
        else:
            logits = F.linear(flat, self.weight, self.bias)
        logits = logits.view(*normed.shape[:-1], len(self.weight))
        if self.scale is not None:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def logit_shape(values: dict) -> tuple[float | None, float | None]:
    """(softcap, scale) that a text config asks for: Gemma's soft-cap, Cohere's factor, Granite's and MiniCPM3's
    divisor.
    """
    softcap = values.get("final_logit_softcapping") or values.get("logits_soft_cap")
    scale = values.get("logit_scale") or values.get("lm_head_multiplier")
    if values.get("logits_scaling"):
        scale = 1.0 / values["logits_scaling"]
    if values.get("dim_model_base"):
        scale = values["dim_model_base"] / values["hidden_size"]
    return softcap, None if scale == 1.0 else scale


def first_value(values: dict, names: Sequence[str], what: str):
    """The first of the named config values that is there."""
    for name in names:
        if values.get(name) is not None:
            return values[name]
    raise TargetError(f"config.json does not say {what}. Expected one of {', '.join(names)}.")
