"""Good exports of every kind for a tiny target, copies with one thing changed, and what a check says of them."""

import json
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafttrain.export.check import CheckReport, check_draft
from drafttrain.export.check_files import TargetFacts
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.target import Target, load_target
from tests.tiny_drafts import make_draft
from tests.tiny_medusa import make_heads
from tests.tiny_models import make_model, make_tokenizer, save
from tests.tiny_students import trained

IDS = torch.tensor([0, 1, 2, 3, 5, 9, *range(20, 50), 97])
DEFAULTS = [2, 4, 5]
"""The layers that engines take of a target of 8."""
BF16 = torch.bfloat16


def target_folder(folder: Path, family: str = "Llama", **changes) -> Path:
    model = make_model(family, **{"max_position_embeddings": 256} | changes)
    return save(folder, model.to(BF16), make_tokenizer())


def read_target(folder: Path) -> Target:
    return load_target(str(folder))


def good_eagle3(target: Target, folder: Path, ids=IDS, **choices) -> Path:
    save_draft(make_draft(target, ids, choices.pop("layers", DEFAULTS), **choices), target, folder, BF16)
    return folder


def good_medusa(target: Target, folder: Path, ids=IDS, **choices) -> Path:
    save_draft(make_heads(target, ids, **choices), target, folder, BF16)
    return folder


def good_original(target: Target, folder: Path) -> Path:
    save_draft(make_heads(target), target, folder.with_name(f"{folder.name}-source"), BF16)
    export_draft(folder.with_name(f"{folder.name}-source"), target, folder, engine="tensorrt-llm")
    return folder


def good_small(target: Target, folder: Path, **choices) -> Path:
    save_draft(trained(target, **choices), target, folder, BF16)
    return folder


def copy(source: Path, folder: Path) -> Path:
    return shutil.copytree(source, folder, ignore=shutil.ignore_patterns("master"))


def settings(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def edit(folder: Path, name: str = "config.json", **changes) -> Path:
    """Settings changed; `...` deletes one."""
    values = {key: value for key, value in (settings(folder, name) | changes).items() if value is not ...}
    (folder / name).write_text(json.dumps(values))
    return folder


def edit_tensors(folder: Path, change) -> Path:
    """The tensors passed through `change`, which alters the dict it is given."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return folder


def setting(name: str = "config.json", **changes):
    """A change of a folder for a table of them: settings; see `edit`."""
    return lambda folder: edit(folder, name, **changes)


def tensors(change):
    """The same: tensors; see `edit_tensors`."""
    return lambda folder: edit_tensors(folder, change)


def verdicts(report: CheckReport) -> dict[str, str]:
    return {verdict.engine: verdict.verdict for verdict in report.engines}


def codes(report: CheckReport) -> dict[str, set[str]]:
    """Of the engines that fail."""
    return {v.engine: {f.code for f in v.findings} for v in report.engines if v.verdict == "FAIL"}


@cache
def facts(target: Path) -> TargetFacts:
    return TargetFacts.read(str(target))


def checked(folder: Path, target: Path, engine: str = "all") -> CheckReport:
    return check_draft(folder, facts(target), engine)
