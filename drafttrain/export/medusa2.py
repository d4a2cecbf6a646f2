"""Medusa-2 on the disk: the heads as ever, and beside them the tuned target that has to be served with them."""

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from drafttrain.drafts.base import TUNED
from drafttrain.drafts.medusa2 import Medusa2Draft
from drafttrain.export.base import check_finite
from drafttrain.export.medusa import write_medusa
from drafttrain.target import Target

GENERATION = "generation_config.json"


def write_medusa2(draft: Medusa2Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """`write_medusa`, and in target/ the tuned target in the unchanged one's dtype, which drafttrain.json then names as
    the heads' own. Adapters that are still at their start have changed nothing: the heads are the unchanged target's,
    and there is no target/. ExportError as `write_medusa`, and for tuned weights that are not finite.
    """
    if not draft.tuned:
        write_medusa(draft.heads, target, folder, dtype, **provenance)
        return
    tuned = write_target(draft, target, folder / TUNED)
    unchanged = {"name": target.title, "fingerprint": target.fingerprint}
    write_medusa(draft.heads, tuned, folder, dtype, tuned_from=unchanged, **provenance)


def write_target(draft: Medusa2Draft, target: Target, folder: Path) -> Target:
    """The tuned target as an ordinary causal-LM folder with the unchanged one's tokenizer and generation config."""
    model = draft.plain_model(target.dtype)
    check_finite(dict(model.named_parameters()), target.dtype)
    # The unchanged file is copied, since transformers does not write all that it reads.
    model.generation_config = GenerationConfig(eos_token_id=sorted(target.stop_ids) or None)
    model.save_pretrained(folder)
    if target.folder is not None and (target.folder / GENERATION).exists():
        shutil.copyfile(target.folder / GENERATION, folder / GENERATION)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    return Target(model, target.tokenizer, f"{target.name}, tuned with these heads", folder)
