"""The shape of an EAGLE-3 draft and its config.json, the one that vLLM, SGLang, TensorRT-LLM and llama.cpp all read."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from drafttrain.drafts.base import DraftError, read_facts
from drafttrain.nn.rotary import ROPE_TYPES
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of the draft; what belongs to the target (eps, RoPE, positions, vocabulary) comes from the target's config.

    feature_layers: the hs[k] it reads, ascending; target_layers: n. rope_scaling: None, or {"rope_type", ...}.
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
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise DraftError(
                f"draft.num_attention_heads is {self.num_attention_heads}, draft.num_key_value_heads "
                f"{self.num_key_value_heads}. "
                "Expected a multiple. Mend: set both."
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
        config = target.config
        heads = draft.num_attention_heads or config.num_attention_heads
        kv_heads = draft.num_key_value_heads or min(config.num_key_value_heads, heads)
        return cls(
            hidden_size=draft.hidden_size or target.hidden_size,
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
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            **target.rope(),
        )

    def to_json(self, dtype: torch.dtype) -> dict:
        """The engines' config.json. Both layer-id lists name the same tensors: hs[k] above, SGLang's k - 1 nested."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
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
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "num_aux_hidden_states": len(self.feature_layers),
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in self.feature_layers],
                "norm_before_fc": False,
            },
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        (folder / "config.json").write_text(json.dumps(self.to_json(dtype), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Eagle3Config":
        """From a checkpoint folder. DraftError where it is missing, is not EAGLE-3, or asks for what is not built."""
        path = folder / "config.json"
        if not path.exists():
            raise DraftError(f"{folder} has no config.json. Expected a draft checkpoint. Mend: check the path.")
        values = read_facts(path)
        if values.get("architectures") != [ARCHITECTURE]:
            raise DraftError(f"{path}: architectures is {values.get('architectures')}, expected [{ARCHITECTURE!r}].")
        unsupported = [key for key in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias") if values.get(key)]
        if unsupported or values.get("num_hidden_layers", 1) != 1:
            raise DraftError(
                f"{path} asks for {', '.join(unsupported) or 'more than one layer'}. Expected a plain one-layer "
                "EAGLE-3 draft."
            )
        names = [name for name in cls.__dataclass_fields__ if name not in ("feature_layers", "rope_scaling")]
        missing = [n for n in names if n not in values and n not in ("bos_token_id", "eos_token_id")]
        layers = values.get("eagle_aux_hidden_state_layer_ids")
        if missing or not layers:
            wanted = ", ".join([*missing, *([] if layers else ["eagle_aux_hidden_state_layer_ids"])])
            raise DraftError(
                f"{path} does not give {wanted}. Expected an EAGLE-3 config. Mend: export the draft again."
            )
        return cls(
            **{name: values.get(name) for name in names},
            feature_layers=tuple(layers),
            rope_scaling=values.get("rope_scaling"),
        )
