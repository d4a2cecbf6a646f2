"""A draft as one GGUF file for llama.cpp: EAGLE-3, and small models of the families llama, qwen2, qwen3 and gemma3.

Made of the exported folder, so it holds the numbers that other engines load, and of the target's tokenizer.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import is_eagle3
from drafttrain.export.base import ExportError
from drafttrain.export.check_engines import LLAMA_CPP_HOOKLESS
from drafttrain.export.gguf_tokenizer import tokenizer_keys
from drafttrain.target import Target
from drafttrain.target_files import weight_files

FILE = "draft.gguf"
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""model_type of a small model: llama.cpp's architecture."""
PERMUTED = ("llama", "eagle3")
"""Architectures whose rotary positions turn neighbouring channels: rows of q and k are reordered for them."""
EAGLE3_NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}
BIASES = {"llama": ("q", "k", "v", "o", "gate", "up", "down"), "qwen2": ("q", "k", "v")}
"""Projections that may have one."""
ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}
SCALINGS = {
    "eagle3": ("linear", "llama3", "yarn"),
    "llama": ("linear", "llama3", "yarn"),
    "qwen2": ("linear", "yarn"),
    "qwen3": ("linear", "yarn"),
    "gemma3": ("linear",),
}
YARN = {"rope_type", "factor", "original_max_position_embeddings"}
YARN_EDGES = {"beta_fast": 32, "beta_slow": 1}
"""What llama.cpp runs these architectures with: only others read the keys for them."""
CONVERTER = "llama.cpp's convert_hf_to_gguf.py on a folder of --engine transformers"

Keys = dict[str, Any]
"""Metadata: int is written as uint32, float as float32, lists by their first element."""


def write_gguf(folder: Path, target: Target) -> None:
    """Write draft.gguf beside the exported EAGLE-3 draft or small model in `folder`: matrices in the stored dtype,
    vectors in fp32, d2t as int64 of absolute ids.

    Raises ExportError for what llama.cpp would serve otherwise than it was trained: other families, positions, layers
    or tokenizers; and without the gguf package.
    """
    gguf = package()
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = dict(_stored(folder))
    if is_eagle3(values):
        arch, rows = "eagle3", target.vocab_size
        keys, tensors = _eagle3(Eagle3Config.load(folder, target.num_layers), stored, target)
    else:
        values = AutoConfig.from_pretrained(folder).to_dict()
        arch, rows = family(values, str(folder)), values["vocab_size"]
        keys, tensors = _small_model(arch, values, stored, gguf)
    dtype = max((t for t in tensors.values() if t.ndim == 2), key=lambda t: t.numel()).dtype
    kinds = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
    general = {"general.type": "model", "general.name": f"draft for {target.title}"}
    general["general.file_type"] = int(gguf.LlamaFileType[kinds[dtype]])
    writer = gguf.GGUFWriter(folder / FILE, arch)
    for name, value in {**general, **keys, **tokenizer_keys(target, rows)}.items():
        _add_key(writer, gguf, name, value)
    for name, tensor in tensors.items():
        _add_tensor(writer, gguf, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def package() -> ModuleType:
    """The gguf package; ExportError where it is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ExportError(f"Writing {FILE} needs the gguf package. Mend: pip install drafttrain[gguf].")
    import gguf

    return gguf


def family(values: dict[str, Any], name: str) -> str:
    """llama.cpp's architecture of a small model's config; ExportError for what it would run otherwise."""
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ExportError(
            f"{name} holds a model of type {kind!r}. {FILE} is written for {', '.join(FAMILIES)}. Mend: run "
            f"{CONVERTER}."
        )
    arch = FAMILIES[kind]
    activation = values.get("hidden_act") or values.get("hidden_activation")
    expected = ACTIVATIONS.get(arch, "silu")
    head_dim, scale = values.get("head_dim"), values.get("query_pre_attn_scalar")
    wrong = {
        f"activation {activation}": activation != expected,
        "sliding windows": arch != "gemma3" and "sliding_attention" in (values.get("layer_types") or ()),
        "soft-capped attention": bool(values.get("attn_logit_softcapping")),
        "attention in both directions": bool(values.get("use_bidirectional_attention")),
        f"query_pre_attn_scalar {scale}": arch == "gemma3" and scale != head_dim,
        f"heads of {head_dim}": arch == "qwen2"
        and bool(head_dim)
        and head_dim * values["num_attention_heads"] != values["hidden_size"],
    }
    found = [what for what, there in wrong.items() if there]
    if found:
        raise ExportError(
            f"{name} holds a {kind} model with {', '.join(found)}, which llama.cpp does not build for this family: it "
            "would serve another model than was trained. Mend: another engine."
        )
    return arch


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no dict
                yield name, file.get_tensor(name)


def _eagle3(config: Eagle3Config, stored: dict[str, Tensor], target: Target) -> tuple[Keys, dict[str, Tensor]]:
    """The keys and tensors of an EAGLE-3 draft; target_layers are hs[k] as ours are."""
    check_hooks(target)
    if config.feature_layers[-1] >= target.num_layers:
        raise ExportError(
            f"the draft reads hs[{config.feature_layers[-1]}] of a target of {target.num_layers} layers. llama.cpp "
            "hands out what goes into a layer, hs[0] to hs[n-1]. Mend: another engine, or train with features.layers "
            "below n."
        )
    values = {**vars(config), "rope_parameters": {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}}
    keys, tensors = _common("eagle3", values)
    keys |= {
        "eagle3.target_layers": list(config.feature_layers),
        "eagle3.target_hidden_size": config.target_hidden_size,
        "eagle3.norm_before_residual": config.norm_before_residual,
        "eagle3.norm_before_fc": False,
    }
    for name, tensor in stored.items():
        if name == "d2t":
            tensors[name] = tensor + torch.arange(len(tensor))
        elif name != "t2d":
            stem, _, leaf = name.rpartition(".")
            if stem not in EAGLE3_NAMES:
                raise ExportError(
                    f"{name} has no place in llama.cpp's EAGLE-3 model. Mend: export from the run folder."
                )
            tensors[f"{EAGLE3_NAMES[stem]}.{leaf}"] = _permuted("eagle3", name, tensor, values)
    return keys, tensors


def check_hooks(target: Target) -> None:
    """ExportError for a target of which llama.cpp does not hand out the hidden states that EAGLE-3 reads."""
    kind = target.config.model_type
    if kind in LLAMA_CPP_HOOKLESS:
        raise ExportError(
            f"{target.title} is a {kind} model. llama.cpp hands out the hidden states that EAGLE-3 reads of llama, "
            "qwen3, gpt-oss, gemma4 and others, not of these. Mend: another engine, or a small draft (method kd)."
        )


def _small_model(
    arch: str, values: dict[str, Any], stored: dict[str, Tensor], gguf: ModuleType
) -> tuple[Keys, dict[str, Tensor]]:
    """The keys and tensors of a causal language model, under the names that the gguf package gives them."""
    keys, tensors = _common(arch, values)
    if arch == "gemma3":
        keys["gemma3.attention.sliding_window"] = values["sliding_window"]
        keys["gemma3.attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in values["layer_types"]
        ]
        keys["gemma3.rope.freq_base_swa"] = float(values["rope_parameters"]["sliding_attention"]["rope_theta"])
        if values.get("final_logit_softcapping"):
            keys["gemma3.final_logit_softcapping"] = float(values["final_logit_softcapping"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], values["num_hidden_layers"])
    for name, tensor in stored.items():
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        *_, projection, leaf = name.split(".")
        if new is None or (leaf == "bias" and projection.removesuffix("_proj") not in BIASES.get(arch, ())):
            raise ExportError(f"{name} has no place in llama.cpp's {arch} model. Mend: another engine.")
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = 1 + tensor.float()  # transformers multiplies by 1 + w, llama.cpp by what the file holds.
        tensors[new] = _permuted(arch, name, tensor, values)
    return keys, tensors


def _common(arch: str, values: dict[str, Any]) -> tuple[Keys, dict[str, Tensor]]:
    """What every architecture has: sizes and positions; llama3's scaling is a tensor of factors."""
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    keys = {
        "vocab_size": values["vocab_size"],
        "context_length": values["max_position_embeddings"],
        "embedding_length": values["hidden_size"],
        "block_count": values["num_hidden_layers"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
    }
    rope = values["rope_parameters"]
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta" and value is not None}
    part, kind = scaling.pop("partial_rotary_factor", 1), scaling.get("rope_type", "default")
    if part != 1 or kind not in ("default", *SCALINGS[arch]):
        raise ExportError(
            f"rope_type is {kind!r}, on a share of {part:g} of each head. Expected default, "
            f"{', '.join(SCALINGS[arch])} on whole heads: what llama.cpp runs as trained. Mend: another engine."
        )
    tensors = {}
    if kind == "llama3":
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        tensors["rope_freqs.weight"] = _frequencies(head_dim, plain, values) / _frequencies(head_dim, rope, values)
    elif kind != "default":
        keys |= _scaling(arch, kind, scaling)
    return {f"{arch}.{name}": value for name, value in keys.items()}, tensors


def _frequencies(head_dim: int, rope: dict[str, Any], values: dict[str, Any]) -> Tensor:
    """Angles a position, fp32 [head_dim / 2]."""
    positions = values["max_position_embeddings"]
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=positions, rope_parameters=rope)
    return LlamaRotaryEmbedding(config).inv_freq.float()


def _scaling(arch: str, kind: str, scaling: dict[str, Any]) -> Keys:
    """The keys of linear and YaRN scaling. ExportError for settings of YaRN that have no key."""
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling.get("factor", 1))}
    if kind == "yarn":
        same = {name for name, value in YARN_EDGES.items() if scaling.get(name) == value}
        others = sorted(scaling.keys() - YARN - same)
        if others:
            raise ExportError(
                f"rope scaling has {', '.join(others)}, which a GGUF file cannot say. Mend: another engine."
            )
        keys["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    return keys


def _permuted(arch: str, name: str, tensor: Tensor, values: dict[str, Any]) -> Tensor:
    """Rows of q and k so that channel i and i + hd/2 of a head, which turn together, are neighbours."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if arch not in PERMUTED or heads is None:
        return tensor
    return tensor.unflatten(0, (values[heads], 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_key(writer, gguf: ModuleType, name: str, value: Any) -> None:
    if isinstance(value, list):
        if value:
            writer.add_array(name, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        writer.add_uint32(name, value)
    else:
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))


def _add_tensor(writer, gguf: ModuleType, name: str, tensor: Tensor) -> None:
    """Vectors of floats in fp32, everything else as it is; numpy has no bfloat16, so its bytes are handed over."""
    if tensor.ndim == 1 and tensor.is_floating_point():
        tensor = tensor.float()
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())
