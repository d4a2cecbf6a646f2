"""Medusa heads as vLLM reads them, and in the layout of their first release, which TensorRT-LLM and TGI read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafts.base import write_provenance
from drafttrain.drafts.medusa import MAP, SHARED, TREE_FILE, MedusaDraft, tree_text
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.export.base import ExportError, check_finite
from drafttrain.nn.tree import StaticTree
from drafttrain.target import Target

ORIGINAL = "medusa_lm_head.safetensors"


def write_medusa(
    draft: MedusaDraft, target: Target, folder: Path, dtype: torch.dtype, heads: int | None = None, **provenance
) -> None:
    """Write config.json, model.safetensors, drafttrain.json and a tree, if any, into an existing, empty folder.

    vLLM's names. The weights take 1 / input_rms in fp32 before they are cast, so engines feed norm(hs[n]) as it is; a
    shared vocabulary matrix is the target's own rows. heads: only the first so many, and the tree down to their depth.
    Raises ExportError when a number does not survive the cast. What no engine serves is written too: our evaluator
    reads it.
    """
    count = heads or draft.shape.num_heads
    out = {name: tensor.detach().cpu() for name, tensor in _engine_tensors(draft, count).items()}
    out = {name: (x.to(dtype) if x.is_floating_point() else x).contiguous() for name, x in out.items()}
    check_finite(out, dtype)
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    replace(draft.shape, num_heads=count).save(folder, dtype)
    _write_tree(draft, count, folder)
    write_provenance(folder, target, method="medusa", **provenance)


def write_original(
    draft: MedusaDraft, target: Target, folder: Path, dtype: torch.dtype, heads: int | None = None, **provenance
) -> None:
    """The layout of FasterDecoding's release: {head}.{layer}.linear.weight|bias and {head}.{layers}.weight.

    Every head has a whole vocabulary matrix there. medusa_fc_bias is for vLLM, which renames these tensors but drops
    their biases without it. ExportError as `write_medusa`, and for sequential heads and smaller draft vocabularies.
    """
    if not draft.whole_vocabulary or draft.shape.sequential:
        what = "sequential heads" if draft.shape.sequential else f"a draft vocabulary of {draft.draft_vocab_size} words"
        raise ExportError(
            f"the draft has {what}. Expected plain heads over the whole vocabulary: the original layout has nothing "
            "else. Mend: --engine vllm, or train with data.draft_vocab: null and draft.sequential: false."
        )
    count, layers = heads or draft.shape.num_heads, draft.shape.num_hidden_layers
    tensors = {_original_name(name): tensor for name, tensor in _folded(draft, count).items()}
    for i in range(count):
        tensors[f"{i}.{layers}.weight"] = draft.lm_heads[i].weight if draft.lm_heads else draft.teacher.weight
    # Clones: safetensors refuses one tensor under several names.
    out = {name: tensor.detach().cpu().to(dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    check_finite(out, dtype)
    save_file(out, folder / ORIGINAL, metadata={"format": "pt"})
    config = original_config(count, layers, str(target.name), draft.shape.hidden_size, draft.shape.vocab_size)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tree(draft, count, folder)
    write_provenance(folder, target, method="medusa", **provenance)


def original_config(heads: int, layers: int, target: str, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """The original layout's config.json."""
    return {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": target,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
    }


def _engine_tensors(draft: MedusaDraft, count: int) -> dict[str, Tensor]:
    """What vLLM reads of the first heads, under its names."""
    out = {f"blocks.{name}": tensor for name, tensor in _folded(draft, count).items()}
    if draft.lm_heads:
        out |= {f"lm_heads.{i}.weight": draft.lm_heads[i].weight for i in range(count)}
    else:
        out[SHARED] = draft.teacher.weight
    return out if draft.whole_vocabulary else out | {MAP: draft.draft_ids}


def _write_tree(draft: MedusaDraft, count: int, folder: Path) -> None:
    """The calibrated tree, or its part that the first heads fill: what was measured of the whole is not true of it."""
    tree, facts = draft.tree, draft.tree_facts
    if tree is None:
        return
    if tree.depth > count:
        tree, facts = StaticTree(tree.parents[: tree.count(count)]), {}
    (folder / TREE_FILE).write_text(tree_text(tree, facts))


def _original_name(name: str) -> str:
    """Of "0.layers.1.weight": "0.1.linear.weight"."""
    head, _, layer, leaf = name.split(".")
    return f"{head}.{layer}.linear.{leaf}"


def check_target(target: Target) -> None:
    """ExportError for a target whose own head has a bias."""
    if target.lm_head_bias is not None:
        raise ExportError(
            f"the head of {target.title} has a bias, which engines leave out of Medusa's heads: they would draft other "
            "words than were trained. Mend: measure them with drafttrain evaluate; for serving an EAGLE-3 draft."
        )


def check_heads(shape: MedusaConfig, heads: int | None) -> int:
    """How many heads are written, or draft: all where none are asked for; ExportError for more than there are."""
    count = shape.num_heads if heads is None else heads
    if not 1 <= count <= shape.num_heads:
        raise ExportError(
            f"--k is {count} and the draft has {shape.num_heads} heads. Expected at most as many drafts a round: "
            "each comes from a head of its own. Mend: a smaller --k, or train with draft.num_heads."
        )
    return count


def is_written(draft: MedusaDraft, folder: Path, count: int) -> bool:
    """Whether the folder's file holds the very names that vLLM reads of so many heads. It passes over others without a
    word, such as the scales of masters; a file without a shared vocabulary matrix still loads here.
    """
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys()) == set(_engine_tensors(draft, count))


def _folded(draft: MedusaDraft, count: int) -> dict[str, Tensor]:
    """{"{head}.layers.{layer}.weight" or bias: fp32} of the first heads, the weights divided by input_rms."""
    out = {}
    scale = draft.input_rms.float()
    for i, block in enumerate(draft.blocks[:count]):
        for name, tensor in block.state_dict().items():
            wide = tensor.float()
            if name.endswith("weight"):
                wide = torch.cat([wide[:, : len(scale)] / scale, wide[:, len(scale) :]], 1)
            out[f"{i}.{name}"] = wide
    return out
