"""Where an EAGLE-3 draft starts from: values taken from the target, or a published draft that is trained on."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.fresh_student import CHUNK, low_rank, principal_axes
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target

GIVEN = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ROUNDING = {"rtol": 2**-7, "atol": 2**-24}
"""What bf16 and fp16 files may be off by from the table that they copy."""


def first_head(rows: Tensor, final_rms: Tensor, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(fc of the last feature [H, Ht], head [Vd, H], gain of the final norm [H]), so that head(norm(fc(x))) is near the
    target's own logits where x is its last hidden state with each channel scaled to 1.

    rows [Vd, Ht]: the target's head; final_rms [Ht]: rms of each channel of its normed last hidden state. With H = Ht
    the feature passes through and the gain is final_rms. A wider draft has zeros behind. A narrower one keeps the
    directions P that hold most of rows * final_rms: fc = P^T, head = rows * final_rms P (Eckart-Young).
    """
    width = rows.shape[1]
    rows, final_rms = rows.float(), final_rms.float()
    if hidden_size >= width:
        extra = hidden_size - width
        passed = torch.eye(hidden_size, width, device=rows.device)
        return passed, F.pad(rows, (0, extra)), F.pad(final_rms, (0, extra), value=1.0)
    scaled = rows * final_rms
    axes = principal_axes(scaled, hidden_size)
    return axes.T, scaled @ axes, torch.ones(hidden_size, device=rows.device)


def first_embeddings(table: Tensor, hidden_size: int) -> Tensor:
    """The target's table [V, Ht] as one of H columns, fp32: itself, with zeros behind, or its best approximation of
    that rank.
    """
    width = table.shape[1]
    if hidden_size < width:
        return low_rank(table, hidden_size)
    return F.pad(table.float(), (0, hidden_size - width))


def normed_rms(feature_rms: Tensor, norms: int) -> Tensor:
    """About the rms of each channel [A*Ht] once so many equal parts of them are normed, each by itself: its share of
    the part's own.

    (A mean over tokens stands for each token's norm; what is off there, fc learns.)
    """
    parts = feature_rms.view(norms, -1)
    return (parts / parts.square().mean(1, keepdim=True).sqrt()).flatten()


def is_table(own: Tensor, table: Tensor) -> bool:
    """Whether embeddings in a file are the target's, but for the file's dtype."""
    pairs = zip(own.split(CHUNK), table.split(CHUNK), strict=False)
    return own.shape == table.shape and all(torch.allclose(a.float(), b.float(), **ROUNDING) for a, b in pairs)


def check_asked(name: str, asked: DraftConfig, config: Eagle3Config, layers: list[int] | None) -> None:
    """DraftError where a recipe asks for another shape or other feature layers than a checkpoint has."""
    found = {key: getattr(asked, key) for key in GIVEN if getattr(asked, key) not in (None, getattr(config, key))}
    found |= {key: True for key in SWITCHES if getattr(asked, key) and not getattr(config, key)}
    wrong = [f"draft.{key} is {value}, there {getattr(config, key)}" for key, value in found.items()]
    if layers is not None and tuple(layers) != config.feature_layers:
        wrong.append(f"features.layers is {list(layers)}, there {list(config.feature_layers)}")
    if wrong:
        raise DraftError(
            f"draft.init_from is {name}: {'; '.join(wrong)}. Expected its own shape and feature layers. Mend: leave "
            "these settings out, or start without init_from."
        )


def fitted_to(config: Eagle3Config, target: Target) -> Eagle3Config:
    """The config with the target's stop tokens where it has none, and with all of the target's positions: published
    drafts often say 2048, beyond which engines would not draft. RoPE stays what the draft was trained with.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = {"original_max_position_embeddings": config.max_position_embeddings, **scaling}
    return replace(
        config,
        rope_scaling=scaling,
        max_position_embeddings=max(config.max_position_embeddings, target.max_positions),
        bos_token_id=target.config.bos_token_id if config.bos_token_id is None else config.bos_token_id,
        eos_token_id=target.config.eos_token_id if config.eos_token_id is None else config.eos_token_id,
    )
