"""The EAGLE-3 directory that vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read: bf16 or fp16, feature scales
folded in.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafttrain.drafts.base import read_facts, write_provenance
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import WEIGHTS
from drafttrain.export.base import ExportError, check_finite
from drafttrain.recipe_rules import unserved
from drafttrain.target import Target


def check_engine(engine: str, config: Eagle3Config) -> None:
    """ExportError that names what of the draft the engine would silently serve otherwise than it was trained."""
    same_size = config.hidden_size == config.target_hidden_size
    has = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_hidden_layers": config.num_hidden_layers > 1,
        "sliding_window": config.sliding_window is not None,
        "train_embeddings": config.own_embeddings and same_size,
    }
    found = unserved(engine, has, config.feature_layers)
    if found:
        raise ExportError(
            f"The draft has {'; '.join(f'{name} ({engine}: {why})' for name, why in found)}. Expected a draft that "
            "the engine serves as it was trained. Mend: --engine vllm, or train without."
        )


def is_written(draft: Eagle3Draft, folder: Path, dtype: torch.dtype) -> bool:
    """Whether a folder holds the very files that `write_eagle3` makes: no other layout of the same draft, and not the
    masters, whose feature_rms engines do not know.
    """
    if not (folder / WEIGHTS).exists() or read_facts(folder / "config.json") != draft.shape.to_json(dtype):
        return False
    with safe_open(folder / WEIGHTS, "pt") as file:
        return "feature_rms" not in set(file.keys())


def write_eagle3(draft: Eagle3Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """Write config.json, model.safetensors and drafttrain.json into an existing, empty folder.

    fc.weight takes 1 / feature_rms in fp32 before it is cast, so engines feed raw features; with norms before fc,
    behind which the scale is divided out, that is the same columns. Raises ExportError when a number does not survive
    the cast.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    scale = tensors.pop("feature_rms").float()
    tensors["fc.weight"] = tensors["fc.weight"].float() / scale
    out = {
        name: tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    if draft.shape.draft_vocab_size == draft.shape.vocab_size:
        del out["d2t"], out["t2d"]
    check_finite(out, dtype)
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    draft.shape.save(folder, dtype)
    write_provenance(folder, target, **provenance)
