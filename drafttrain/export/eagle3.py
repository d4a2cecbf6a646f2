"""The EAGLE-3 directory that vLLM, SGLang, TensorRT-LLM and llama.cpp's converter read: bf16 or fp16, feature scales
folded in.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafttrain.data.files import replace_folder
from drafttrain.drafts.base import write_provenance
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.loading import load_draft
from drafttrain.errors import UserError
from drafttrain.target import Target


class ExportError(UserError):
    """A draft that cannot be written for the engine asked for."""


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
    broken = [name for name, tensor in out.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ExportError(
            f"{', '.join(broken)} hold numbers that are not finite in {dtype}. Expected finite weights. "
            "Mend: export.dtype=bfloat16 if float16 overflows; otherwise go back to an earlier checkpoint."
        )
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    draft.shape.save(folder, dtype)
    write_provenance(folder, target, **provenance)


def save_draft(draft: Eagle3Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """The run's draft folder, swapped in whole: the export itself, and fp32 masters with unfolded scales in master/."""

    def fill(path: Path) -> None:
        write_eagle3(draft, target, path, dtype, **provenance)
        (path / "master").mkdir()
        draft.save_pretrained(path / "master")

    replace_folder(folder, fill)


FILES = ("config.json", "model.safetensors", "drafttrain.json")


def export_eagle3(draft_folder: Path, target: Target, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the engines' directory from a run's draft folder: the very files that were evaluated, or, for another
    dtype, from the fp32 masters. `folder` is replaced whole.

    Raises DraftError where the draft does not fit the target, ExportError where there are no masters, a number does not
    survive the cast, or `folder` holds anything else than a former export.
    """
    master = draft_folder / "master"
    stored = load_draft(draft_folder, target).fc.weight.dtype
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in FILES) if folder.is_dir() else []
    if others or folder.is_file():
        raise ExportError(
            f"{folder} holds {', '.join(others[:4]) or 'something else'}; expected a new or empty folder, or a former "
            "export, which is replaced. Mend: give another --output."
        )

    def fill(path: Path) -> None:
        if dtype is None or dtype == stored:
            for name in FILES:
                if (draft_folder / name).exists():
                    shutil.copyfile(draft_folder / name, path / name)
        elif master.exists():
            write_eagle3(Eagle3Draft.from_pretrained(master), target, path, dtype, **_details(draft_folder))
        else:
            raise ExportError(
                f"{draft_folder} holds {stored} weights and no fp32 masters, {dtype} was asked for. "
                "Mend: leave --dtype out, or export from the run folder."
            )

    replace_folder(folder, fill)


def _details(draft_folder: Path) -> dict:
    """What a draft's drafttrain.json says beyond the target: its validation figures."""
    facts = json.loads((draft_folder / "drafttrain.json").read_text())
    return {key: value for key, value in facts.items() if not key.startswith(("target", "tokenizer"))}


ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
VLLM_WITHOUT_HOOKS = ("gemma", "gemma2", "gemma3", "gemma3_text", "mixtral", "glm4", "exaone4")
"""Targets whose native vLLM implementation has no EAGLE-3 hooks; the transformers backend has them (vLLM 0.32)."""


def serve_command(engine: str, target: Target, folder: Path, k: int) -> str | None:
    """The command line that serves the target with this draft in vLLM or SGLang; None for engines whose command is
    not known here.
    """
    # Of a GGUF file the converted folder is served.
    model = target.folder if Path(target.name).expanduser().exists() else target.name
    if engine == "vllm":
        backend = " --model-impl transformers" if target.config.model_type in VLLM_WITHOUT_HOOKS else ""
        spec = f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {k}}}'
        return f"vllm serve {model}{backend} --speculative-config '{spec}'"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        )
    return None
