"""EAGLE-3 checkpoints as others write them: flat settings and tensors under the engines' names, whatever the layout.

Known are the engines' form, SafeAILab's (the same tensors, also as pytorch_model.bin, settings left out) and that of
speculators (layers.0.* for midlayer.*, settings nested).
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.drafts.base import DraftError, read_facts

ARCHITECTURE = "LlamaForCausalLMEagle3"
OTHER_NAMES = ("LlamaForCausalLM", "Eagle3LlamaForCausalLM")
"""Architectures that are EAGLE-3 drafts only together with draft_vocab_size."""
WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
TARGETS_OWN = ("verifier_", "t2d")
"""Tensors that are the target's, or follow from d2t."""
UNREADABLE = (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


def is_eagle3(values: dict[str, Any]) -> bool:
    """Whether a config.json is an EAGLE-3 draft's, in one of the known layouts."""
    if "speculators_model_type" in values:
        return values["speculators_model_type"] == "eagle3"
    name = (values.get("architectures") or [None])[0]
    return name == ARCHITECTURE or (name in OTHER_NAMES and "draft_vocab_size" in values)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a checkpoint's config.json in the engines' flat form. What is left out has the value that Llama's
    config gives it, with which the draft was trained. DraftError where it is missing or no EAGLE-3 draft's.
    """
    path = folder / "config.json"
    if not path.exists():
        raise DraftError(f"{folder} has no config.json. Expected a draft checkpoint. Mend: check the path.")
    values = read_facts(path)
    if not is_eagle3(values):
        kind = values.get("speculators_model_type")
        found = f"speculators_model_type is {kind!r}" if kind else f"architectures is {values.get('architectures')}"
        raise DraftError(f"{path}: {found}, expected an EAGLE-3 draft, [{ARCHITECTURE!r}].")
    if "speculators_model_type" in values:
        inner = values.get("transformer_layer_config") or {}
        values = {"norm_before_residual": True, **inner, **values}
    out = {**values, **_rope(values)}
    defaults = {
        "num_key_value_heads": values.get("num_attention_heads"),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "draft_vocab_size": values.get("vocab_size"),
        "target_hidden_size": values.get("hidden_size"),
        "num_hidden_layers": 1,
        "norm_before_residual": False,
    }
    for name, default in defaults.items():
        if out.get(name) is None:
            out[name] = default
    size, heads = out.get("hidden_size"), out.get("num_attention_heads")
    if out.get("head_dim") is None and isinstance(size, int) and isinstance(heads, int) and heads > 0:
        out["head_dim"] = size // heads
    return out


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """rope_theta (10000 where none is said), rope_scaling, and the part that is rotated, where not all is."""
    theta, scaling = rope_of(values)
    said = values.get("rope_scaling") or values.get("rope_parameters") or {}
    part = said.get("partial_rotary_factor") or values.get("partial_rotary_factor")
    return {
        "rope_theta": float(theta or 10000.0),
        "rope_scaling": scaling,
        "partial_rotary_factor": None if part == 1 else part,
    }


def rope_of(values: dict[str, Any]) -> tuple[float | None, dict | None]:
    """(theta, scaling) of a config of either generation, the full-attention entry where there are two; scaling None:
    plain RoPE. Its kind is under rope_type.
    """
    parameters = values.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    theta = values.get("rope_theta") or parameters.get("rope_theta")
    dropped = ("rope_theta", "partial_rotary_factor", "type")
    rest = values.get("rope_scaling") or parameters
    scaling = {key: value for key, value in rest.items() if key not in dropped and value is not None}
    scaling["rope_type"] = rest.get("rope_type") or rest.get("type") or "default"
    return theta, None if scaling["rope_type"] == "default" else scaling


def feature_layers_of(values: dict[str, Any], num_layers: int | None) -> list[int] | None:
    """The hs[k] that a draft reads: the top-level list, else SGLang's nested one (k - 1), else, of a target of that
    many layers, the three that engines and trainers take; None where that is not known either.
    """
    layers = values.get("eagle_aux_hidden_state_layer_ids")
    if layers:
        return list(layers)
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested:
        return [k + 1 for k in nested]
    if num_layers is None or num_layers < 7 or values.get("num_aux_hidden_states") not in (None, 3):
        return None
    return [2, num_layers // 2, num_layers - 3]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the engines' names, without what belongs to the target. DraftError where they
    are missing or broken.
    """
    paths = weight_paths(folder)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            raise DraftError(f"{path} cannot be read ({error}). Mend: export or download the draft again.") from error
    return {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(TARGETS_OWN) and not name.endswith("rotary_emb.inv_freq")
    }


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold the weights: one of safetensors, its parts, or SafeAILab's pytorch_model.bin."""
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise DraftError(f"{folder / INDEX} cannot be read ({error}). Mend: download the draft again.") from error
    else:
        names = [WEIGHTS if (folder / WEIGHTS).exists() or not (folder / PICKLED).exists() else PICKLED]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise DraftError(f"{folder} has no {missing[0]}. Expected an EAGLE-3 checkpoint. Mend: check the path.")
    return [folder / name for name in names]
