"""Reading a draft checkpoint of any kind from a folder, a run folder or a hub id, and checking that it fits the
target.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor

from drafttrain.drafts.base import Draft, DraftError, check_provenance
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import ARCHITECTURE, Eagle3Config
from drafttrain.recipe import Recipe
from drafttrain.target import Target

KINDS = {ARCHITECTURE: Eagle3Draft}


def load_draft(name_or_path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """A Draft in eval mode on the target's device, attached to the target.

    name_or_path: a run folder (its draft/), a checkpoint or export folder, or a hub id. dtype None keeps the stored
    one. Raises DraftError where nothing is found, the kind is unknown, or vocabulary, tokenizer or sizes do not fit
    the target.
    """
    folder = find_draft(name_or_path)
    kind = _kind(folder)
    check_provenance(folder, target)
    return kind.from_pretrained(folder, dtype).to(target.device).eval().attach(target)


def draft_method(folder: Path) -> str:
    """The method of the draft in a folder: eagle3, .. DraftError where it is none that this version knows."""
    return _kind(folder).method


def _kind(folder: Path) -> type[Draft]:
    try:
        architectures = json.loads((folder / "config.json").read_text()).get("architectures")
    except json.JSONDecodeError as error:
        raise DraftError(f"{folder / 'config.json'} is not JSON ({error}). Mend: export the draft again.") from error
    kind = KINDS.get((architectures or [""])[0])
    if kind is None:
        raise DraftError(
            f"{folder / 'config.json'}: architectures is {architectures}. Expected one of {', '.join(KINDS)}. "
            "Mend: give a draft checkpoint, not a whole model."
        )
    return kind


def find_draft(name_or_path: str | Path) -> Path:
    """The folder that holds the draft's config.json; a hub id is downloaded. DraftError where there is none."""
    path = Path(name_or_path)
    for folder in (path / "draft", path):
        if (folder / "config.json").exists():
            return folder
    if path.exists() or str(name_or_path).count("/") != 1 or str(name_or_path).startswith((".", "/", "~")):
        raise DraftError(
            f"{name_or_path} holds no draft: no config.json in it or in its draft/ folder. Expected a run folder, a "
            "draft folder "
            "or a hub id. Mend: check the path, or train first."
        )
    try:
        folder = Path(snapshot_download(str(name_or_path)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise DraftError(
            f"{name_or_path} is neither a folder nor a hub id that can be reached ({type(error).__name__}). "
            "Mend: check the spelling and the network, or give a local folder."
        ) from error
    if not (folder / "config.json").exists():
        raise DraftError(f"{name_or_path} on the hub has no config.json. Expected a draft checkpoint.")
    return folder


def new_draft(
    recipe: Recipe, target: Target, feature_layers: list[int], draft_ids: Tensor, statistics: dict[str, Tensor]
) -> Draft:
    """A freshly initialised draft of the recipe's method on the target's device, attached, with its training settings.

    draft_ids int64 [Vd]: the draft vocabulary; statistics: feature_rms [A*Ht] and final_rms [Ht]. Raises DraftError
    for a method or setting that this version does not build.
    """
    if recipe.method != "eagle3":
        raise DraftError(f"method is {recipe.method!r}; this version trains eagle3. Mend: method: eagle3.")
    if recipe.draft.init_from is not None:
        raise DraftError("draft.init_from is set; warm starts are not built yet. Mend: leave it out.")
    config = Eagle3Config.for_target(target, recipe.draft, feature_layers, len(draft_ids))
    draft = Eagle3Draft(config, draft_ids).to(target.device).attach(target)
    draft.initialise(**statistics, seed=recipe.training.seed)
    draft.ttt_steps = recipe.training.ttt_steps
    draft.step_decay = recipe.training.step_decay
    draft.loss = recipe.training.loss
    return draft
