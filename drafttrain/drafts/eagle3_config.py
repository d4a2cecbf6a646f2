"""The shape of an EAGLE-3 draft and its config.json, the one that vLLM, SGLang, TensorRT-LLM and llama.cpp all read."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3_files import ARCHITECTURE, feature_layers_of, read_settings
from drafttrain.nn.rotary import ROPE_TYPES
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
    "num_hidden_layers",
)


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of the draft; what belongs to the target (eps, RoPE, positions, vocabulary) comes from the target's config.

    feature_layers: the hs[k] it reads, ascending. rope_scaling: None, or {"rope_type", ...}. norm_before_fc norms
    the captured features before fc, all as one vector; EAGLE-3.1: fc_norm norms each of them, norm_output feeds the
    normed state on instead of the un-normed one. sliding_window: how many positions, its own included, a row looks
    back at most. own_embeddings: a table [V, H] of the draft's own, which config.json does not say: the tensor is
    there or not.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict | None = None
    norm_before_residual: bool = False
    num_hidden_layers: int = 1
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = None
    own_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise DraftError(
                f"draft.num_attention_heads is {self.num_attention_heads}, draft.num_key_value_heads "
                f"{self.num_key_value_heads}. "
                "Expected a multiple. Mend: set both."
            )
        if self.head_dim % 2:
            raise DraftError(
                f"draft.head_dim is {self.head_dim}. Expected an even number: rotary positions turn pairs of channels."
            )
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise DraftError(
                f"The target's rope_type is {kind!r}. Expected one of {', '.join(ROPE_TYPES)}, which EAGLE-3 drafts "
                "are served with."
            )

    @classmethod
    def for_target(
        cls, target: Target, draft: DraftConfig, feature_layers: list[int], draft_vocab_size: int
    ) -> "Eagle3Config":
        """The draft that fits a target: what the recipe's `draft` leaves open is the target's own."""
        config, values = target.config, target.config.to_dict()  # Qwen3-VL's text config names no ends.
        heads = draft.num_attention_heads or config.num_attention_heads
        kv_heads = draft.num_key_value_heads or min(config.num_key_value_heads, heads)
        hidden_size = draft.hidden_size or target.hidden_size
        return cls(
            hidden_size=hidden_size,
            intermediate_size=draft.intermediate_size or config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=draft.head_dim or target.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target.hidden_size,
            feature_layers=tuple(feature_layers),
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_positions,
            norm_before_residual=draft.norm_before_residual,
            num_hidden_layers=draft.num_hidden_layers or 1,
            norm_before_fc=draft.norm_before_fc,
            fc_norm=draft.fc_norm,
            norm_output=draft.norm_output,
            sliding_window=draft.sliding_window,
            own_embeddings=hidden_size != target.hidden_size or draft.train_embeddings is True,
            bos_token_id=values.get("bos_token_id"),
            eos_token_id=values.get("eos_token_id"),
            **target.rope(),
        )

    def to_json(self, dtype: torch.dtype) -> dict:
        """The engines' config.json. Both layer-id lists name the same tensors: hs[k] above, SGLang's k - 1 nested."""
        window = {}
        if self.sliding_window is not None:
            kinds = ["sliding_attention"] * self.num_hidden_layers
            window = {"sliding_window": self.sliding_window, "layer_types": kinds}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "attention_bias": False,
            "mlp_bias": False,
            "bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "num_aux_hidden_states": len(self.feature_layers),
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in self.feature_layers],
                "norm_before_fc": self.norm_before_fc,
            },
            **window,
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        (folder / "config.json").write_text(json.dumps(self.to_json(dtype), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, num_layers: int | None = None) -> "Eagle3Config":
        """From a checkpoint folder of any known layout, for a target of num_layers layers where that is known.
        DraftError where it is missing, is not EAGLE-3, or asks for what is not built.
        """
        values, path = read_settings(folder), folder / "config.json"
        nested = values.get("eagle_config") or {}
        others = ("attention_bias", "partial_rotary_factor")
        unsupported = [key for key in others if values.get(key) or nested.get(key)]
        if unsupported:
            raise DraftError(f"{path} asks for {', '.join(unsupported)}. Expected an EAGLE-3 draft without.")
        layers = feature_layers_of(values, num_layers)
        missing = [name for name in SIZES if not isinstance(values.get(name), int) or values[name] < 1]
        if missing or not layers:
            wanted = ", ".join([*missing, *([] if layers else ["eagle_aux_hidden_state_layer_ids"])])
            raise DraftError(
                f"{path} does not give {wanted}. Expected an EAGLE-3 config. Mend: export the draft again."
            )
        return cls(
            **{name: values[name] for name in SIZES},
            **{name: bool(values.get(name)) for name in ("norm_before_residual", "fc_norm", "norm_output")},
            **{name: values.get(name) for name in ("bos_token_id", "eos_token_id")},
            norm_before_fc=bool(nested.get("norm_before_fc", values.get("norm_before_fc"))),
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values["rope_theta"],
            rope_scaling=values["rope_scaling"],
            feature_layers=tuple(layers),
            sliding_window=_window(values, path),
        )


def _window(values: dict, path: Path) -> int | None:
    """The sliding window, which counts only where layer_types say so."""
    kinds = set(values.get("layer_types") or ["full_attention"])
    if kinds == {"full_attention"}:
        return None
    window = values.get("sliding_window")
    if kinds != {"sliding_attention"} or not isinstance(window, int) or window < 1:
        raise DraftError(
            f"{path}: layer_types is {values['layer_types']}, sliding_window {window}. Expected all layers with the "
            "same window, or none."
        )
    return window
