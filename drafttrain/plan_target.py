"""The frozen target of a plan, and any transformers model, from its config alone: laid out on the meta device, which
allocates nothing, so that every family is counted as it is built.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.evaluate.roofline import FAMILIES
from drafttrain.plan_candidates import PlanError
from drafttrain.recipe import TargetConfig
from drafttrain.target import find_decoder
from drafttrain.target_bare import bare_model, experts_of
from drafttrain.target_files import choose_dtype, find_folder, read_config, weight_files

STORED = {"fp8": 1.0, "mxfp4": 0.54, "gptq": 0.56, "awq": 0.56, "bitsandbytes": 0.56, "compressed-tensors": 1.0}
"""Bytes of a weight by quant_method, scales included, taken to hold for all weights of files that are not here."""


@dataclass(frozen=True)
class LayerShape:
    """What activations and products of a decoder layer follow from.

    H hidden size, I feed-forward width (of a token: of all the experts that it uses), nh query and nkv key-value heads
    of D channels; norms: of width H in a layer; head_norms: q and k are normed.
    """

    H: int
    I: int  # noqa: E741
    nh: int
    nkv: int
    D: int
    norms: int = 2
    head_norms: bool = False
    gemma: bool = False

    @property
    def q(self) -> int:
        """Width of all queries."""
        return self.nh * self.D

    @property
    def kv(self) -> int:
        """Width of all keys; of all values too."""
        return self.nkv * self.D


@dataclass(frozen=True)
class ModelOutline:
    """A causal language model's parameters and shape. table: the embedding; head: 0 where it is the table; layers: of
    each decoder layer; active: of all layers, those that a token is multiplied with; linears: (in, out) of each linear
    layer of each decoder layer, which adapters may sit on.
    """

    config: PretrainedConfig
    parameters: int
    table: int
    head: int
    layers: tuple[int, ...]
    norm: int
    active: int
    shape: LayerShape
    linears: tuple[tuple[tuple[str, int, int], ...], ...]

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    @property
    def H(self) -> int:
        return self.shape.H


@dataclass(frozen=True)
class TargetOutline:
    """The frozen target: its text model, all its parameters (vision towers included), bytes on the device.

    itemsize: bytes of a plain weight and of its activations; notes: what was assumed; devices: over how many a process
    spreads it (target.device_map), in equal parts.
    """

    name: str
    model: ModelOutline
    parameters: int
    bytes: int
    itemsize: int
    dtype: str
    quantised: str | None
    notes: tuple[str, ...] = ()
    devices: int = 1

    @property
    def kv_bytes(self) -> int:
        """A token's keys and values in all layers, on all its devices; windows are not taken off. Latent attention
        (MLA, DeepSeek) keeps the compressed ones and the rotated channels.
        """
        values = self.model.config.to_dict()
        rank = values.get("kv_lora_rank")
        each = rank + values["qk_rope_head_dim"] if rank else 2 * self.model.shape.kv
        return each * len(self.model.layers) * self.itemsize

    def bytes_of(self, processes: int) -> int:
        """On a device of one process where the layers are spread over so many (target.shard): its share, all else
        whole, and two gathered layers: the one that runs and the next.
        """
        if processes == 1:
            return self.bytes // self.devices
        layers = sum(self.model.layers) * self.itemsize
        return self.bytes - layers + layers // processes + 2 * max(self.model.layers) * self.itemsize


def outline_target(settings: TargetConfig, device: str = "cuda") -> TargetOutline:
    """The target of a recipe from its config; weights are looked at where they are in a local folder, never read.

    device: cuda or cpu, where float16 becomes bfloat16. TargetError where there is no config, within seconds without a
    network; PlanError where transformers cannot lay the model out.
    """
    where = (settings.name_or_path, settings.gguf_file, settings.revision, settings.trust_remote_code)
    folder = find_folder(*where, weights=False)
    config = read_config(str(folder), settings.trust_remote_code)
    model = _laid_out(config, settings.trust_remote_code)
    dtype = choose_dtype(settings.dtype, config, folder, torch.device(device))
    total = sum(p.numel() for p in model.parameters())
    quantised, notes, size = _quantisation(config), [], total * dtype.itemsize
    files = [path for path in weight_files(folder) if path.exists()]
    if quantised and files:
        size = sum(path.stat().st_size for path in files)
    elif quantised:
        each = STORED.get(quantised, dtype.itemsize)
        size = round(total * each)
        notes.append(
            f"the target is quantised ({quantised}) and its files are not here: counted at {each:g} bytes a weight"
        )
    path = Path(settings.name_or_path).expanduser()
    name = settings.name_or_path
    if path.exists():
        name = path.stem if path.suffix == ".gguf" else path.name
    outline = outline_of(model, config.get_text_config(decoder=True))
    return TargetOutline(name, outline, total, size, dtype.itemsize, _name(dtype), quantised, tuple(notes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quantisation(config: PretrainedConfig) -> str | None:
    found = config.to_dict().get("quantization_config")
    return str(found.get("quant_method", "unknown")) if found else None


def _laid_out(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a config on the meta device."""
    try:
        return bare_model(config, trust_remote_code)
    except (ValueError, KeyError, ImportError, RuntimeError, OSError) as error:
        raise PlanError(
            f"the model of type {config.model_type!r} cannot be laid out from its config ({error}). Mend: upgrade "
            "transformers, or choose a target that it knows"
        ) from error


def outline_model(config: PretrainedConfig) -> ModelOutline:
    """Of a causal language model's text config."""
    return outline_of(_laid_out(config), config)


def outline_of(model: PreTrainedModel, config: PretrainedConfig) -> ModelOutline:
    """Of a model that is laid out already, and its text config."""
    decoder, norm = find_decoder(model)
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    layers = decoder.get_submodule("layers")
    sizes = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    linears = tuple(
        tuple(
            (name, module.in_features, module.out_features)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        )
        for layer in layers
    )
    parameters = sum(p.numel() for p in model.parameters())
    final = sum(p.numel() for p in norm.parameters())
    own_head = 0 if head is table else head.numel()
    active = sum(sizes) - _idle_experts(config.to_dict(), layers)
    shape = layer_shape(config)
    return ModelOutline(config, parameters, table.numel(), own_head, sizes, final, active, shape, linears)


def _idle_experts(values: dict[str, Any], layers: nn.ModuleList) -> int:
    """Parameters of the experts that a token does not use: the share 1 - topk / E of everything below `experts`."""
    experts, routed = experts_of(values)
    if not experts:
        return 0
    inside = sum(p.numel() for name, p in layers.named_parameters() if ".experts." in f".{name}")
    return round(inside * (1 - routed / experts))


def layer_shape(config: PretrainedConfig) -> LayerShape:
    """A layer's shape from a text config; a model type that the roofline does not know is taken for a Llama."""
    values, kind = config.to_dict(), config.model_type
    family = FAMILIES.get(kind, FAMILIES["llama"])
    H, nh = values["hidden_size"], values["num_attention_heads"]
    inner = values.get("intermediate_size") or 4 * H
    _, routed = experts_of(values)
    if routed:
        inner = routed * (values.get("moe_intermediate_size") or inner)
    nkv = values.get("num_key_value_heads") or nh
    D = values.get("head_dim") or H // nh
    return LayerShape(H, inner, nh, nkv, D, family.norms, family.head_norms, kind.startswith("gemma"))
