"""A draft as a folder: what a run keeps and what leaves for an engine. The layout of each kind is its module's own."""

import json
import shutil
from pathlib import Path

import torch

from drafttrain.data.files import replace_folder
from drafttrain.drafts.base import Draft
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.kd import IDS_FILE, KdDraft
from drafttrain.drafts.loading import MASTER, load_draft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.drafts.medusa2 import Medusa2Draft
from drafttrain.export import card, eagle3, gguf, kd, medusa, medusa2
from drafttrain.export.base import ExportError, check_place
from drafttrain.target import Target
from drafttrain.target_files import stored_dtypes

OWN = (gguf.FILE, card.FILE)
"""Files that each export writes for itself."""


def write_draft(draft: Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """The engines' layout of the draft's kind, into an existing, empty folder. ExportError as its writer says."""
    if isinstance(draft, KdDraft):
        kd.write_small_model(draft, target, folder, dtype, **provenance)
    elif isinstance(draft, MedusaDraft):
        medusa.write_medusa(draft, target, folder, dtype, **provenance)
    elif isinstance(draft, Medusa2Draft):
        medusa2.write_medusa2(draft, target, folder, dtype, **provenance)
    else:
        assert isinstance(draft, Eagle3Draft), draft.method
        eagle3.write_eagle3(draft, target, folder, dtype, **provenance)


def save_draft(draft: Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    """The run's draft folder, swapped in whole: the export itself, and in master/ the fp32 weights as trained."""

    def fill(path: Path) -> None:
        write_draft(draft, target, path, dtype, **provenance)
        (path / MASTER).mkdir()
        draft.save_pretrained(path / MASTER)

    replace_folder(folder, fill)


def export_draft(
    draft_folder: Path,
    target: Target,
    folder: Path,
    dtype: torch.dtype | None = None,
    k: int | None = None,
    engine: str = "vllm",
) -> int | None:
    """Write the engines' directory from a run's draft folder: the very files that were evaluated, or, for another
    dtype, from the fp32 masters; a small model with other padding than the target's leaves with the target's. `folder`
    is replaced whole. Returns k, or for Medusa heads how many were written.

    k: the drafts a round that a small model's generation config asks for, and how many of a draft's Medusa heads are
    written (None: all). engine: TensorRT-LLM reads Medusa heads in a layout of their own; for llama.cpp draft.gguf is
    written beside the other files. Raises DraftError where the draft does not fit the target, ExportError where there
    are no masters, a number does not survive the cast, engines would serve another draft, or `folder` holds anything
    else than a former export.
    """
    draft = load_draft(draft_folder, target)
    stored = _stored_dtype(draft, draft_folder)
    files = sorted(entry.name for entry in draft_folder.iterdir() if entry.is_file() and entry.name not in OWN)
    made = ("generation_config.json", IDS_FILE, medusa.ORIGINAL, medusa.TREE_FILE, *OWN)
    check_place(folder, {*files, *made}, "export")
    if isinstance(draft, MedusaDraft):
        medusa.check_target(target)
        k = medusa.check_heads(draft.shape, k)
    if isinstance(draft, Eagle3Draft):
        eagle3.check_engine(engine, draft.shape)

    def fill(path: Path) -> None:
        if isinstance(draft, MedusaDraft):
            as_stored = engine != "tensorrt-llm" and medusa.is_written(draft, draft_folder, k)
        elif isinstance(draft, Eagle3Draft):
            as_stored = eagle3.is_written(draft, draft_folder, stored)
        else:
            as_stored = not (isinstance(draft, KdDraft) and draft.aligned)
        if as_stored and dtype in (None, stored):
            for name in files:
                shutil.copyfile(draft_folder / name, path / name)
        else:
            exact, details = _exact(draft, draft_folder, target, stored, dtype), _details(draft_folder)
            if isinstance(draft, MedusaDraft):
                write = medusa.write_original if engine == "tensorrt-llm" else medusa.write_medusa
                write(exact, target, path, dtype or stored, k, **details)
            else:
                write_draft(exact, target, path, dtype or stored, **details)
        if k is not None and isinstance(draft, KdDraft):
            kd.assistant_settings(target, k).save_pretrained(path)
        if engine == "llama.cpp":
            gguf.write_gguf(path, target)
        card.write_card(path, folder, draft, draft_folder, target, k or 3)

    replace_folder(folder, fill)
    return k


def _stored_dtype(draft: Draft, folder: Path) -> torch.dtype:
    if isinstance(draft, Eagle3Draft):
        return draft.fc.weight.dtype
    dtypes = stored_dtypes(folder)  # As loaded would not do: CPUs load float16 as bfloat16.
    return max(set(dtypes), key=dtypes.count)


def _exact(draft: Draft, folder: Path, target: Target, stored: torch.dtype, dtype: torch.dtype | None) -> Draft:
    """The draft in the numbers that are to be cast: the fp32 masters, or as stored where that is the dtype wanted."""
    if (folder / MASTER).exists():
        return _from_masters(draft, folder, target)
    if dtype in (None, stored) and isinstance(draft, Eagle3Draft):
        return draft
    if dtype in (None, stored):
        return type(draft).from_pretrained(folder, stored).to(target.device).attach(target)
    raise ExportError(
        f"{folder} holds {stored} weights and no fp32 masters, {dtype} was asked for. "
        "Mend: leave --dtype out, or export from the run folder."
    )


def _from_masters(draft: Draft, folder: Path, target: Target) -> Draft:
    if isinstance(draft, KdDraft):
        return kd.from_masters(folder, folder / MASTER).to(target.device).attach(target)
    if isinstance(draft, MedusaDraft):
        return MedusaDraft.from_pretrained(folder / MASTER).to(target.device).attach(target)
    return Eagle3Draft.from_pretrained(folder / MASTER)


def _details(draft_folder: Path) -> dict:
    """What a draft's drafttrain.json says beyond the target: its validation figures."""
    path = draft_folder / "drafttrain.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    ours = ("target", "tokenizer", "method", "student")
    return {key: value for key, value in facts.items() if not key.startswith(ours)}
