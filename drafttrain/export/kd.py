"""A small draft as an ordinary causal-LM directory: vLLM's draft_model, SGLang's STANDALONE, transformers'
assistant_model, and llama.cpp's converter read it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from drafttrain.drafts.base import write_provenance
from drafttrain.drafts.kd import IDS_FILE, KdDraft
from drafttrain.export.base import ExportError, check_finite
from drafttrain.target import Target

DEFAULT_K = 4


def write_small_model(draft: KdDraft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """Write config, generation config, tokenizer and every word's weights into an existing, empty folder.

    The vocabulary is the target's padded one; adapters are merged. Raises ExportError when a number does not survive
    the cast.
    """
    model = draft.plain_model(dtype)
    check_finite(dict(model.named_parameters()), dtype)
    model.generation_config = assistant_settings(target, DEFAULT_K)
    model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    if not draft.whole_vocabulary:
        (folder / IDS_FILE).write_text(json.dumps(draft.draft_ids.tolist()) + "\n")
    write_provenance(folder, target, method="kd", student=draft.name, **provenance)


def assistant_settings(target: Target, k: int) -> GenerationConfig:
    """What transformers' assisted generation reads from the DRAFT: k tokens every round, whatever its confidence."""
    return GenerationConfig(
        eos_token_id=sorted(target.stop_ids) or None,
        bos_token_id=target.config.bos_token_id,
        pad_token_id=target.config.pad_token_id,
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


def from_masters(folder: Path, masters: Path) -> KdDraft:
    """The draft of a run with its fp32 weights as trained in place of the written ones."""
    draft = KdDraft.from_pretrained(folder)
    trained = load_file(masters / "model.safetensors")
    parameters = dict(draft.student.named_parameters())
    unknown = sorted(trained.keys() - parameters.keys())
    if unknown:
        raise ExportError(
            f"{masters} holds {unknown[0]}, which the model in {folder} does not have. Expected the masters of that "
            "very draft. Mend: train again, or leave --dtype out."
        )
    for name, tensor in trained.items():
        parameters[name].data = tensor
    return draft
