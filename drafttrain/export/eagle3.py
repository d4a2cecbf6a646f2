"""The EAGLE-3 directory that vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read: bf16 or fp16, feature scales
folded in.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from drafttrain.drafts.base import write_provenance
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.export.base import check_finite
from drafttrain.target import Target


def write_eagle3(draft: Eagle3Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """Write config.json, model.safetensors and drafttrain.json into an existing, empty folder.

    fc.weight takes 1 / feature_rms in fp32 before it is cast, so engines feed raw features. Raises ExportError when a
    number does not survive the cast.
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
