"""A target from its config alone: the class that loads it, the model without memory for its weights, its experts."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ROUTED = ("num_experts_per_tok", "moe_k", "top_k_experts")


def loader_of(config: PretrainedConfig, trust_remote_code: bool = False) -> type:
    """The Auto class of a config: that of causal language models, or of multimodal ones where there is no other."""
    text_only = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or trust_remote_code
    return AutoModelForCausalLM if text_only else AutoModelForImageTextToText


def bare_model(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that a config describes, as Target would load it, on the meta device; its head is the table where the
    text model's own config says so: a wrapper's default (Mistral 3) does not hold against a stored head.
    """
    with torch.device("meta"), no_init_weights():
        model = loader_of(config, trust_remote_code).from_config(config, trust_remote_code=trust_remote_code)
    if {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}.get("tie_word_embeddings"):
        model.tie_weights()  # which the skipped initialisation would have done
    return model


def experts_of(values: Mapping[str, Any]) -> tuple[int, int]:
    """(experts of a layer, how many of them a token uses) of a text config; (0, 0) of a dense model."""
    experts = next((values[key] for key in EXPERTS if values.get(key)), 0)
    return experts, next((values[key] for key in ROUTED if values.get(key)), 0) if experts else 0
