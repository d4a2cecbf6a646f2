"""Reading a draft checkpoint of any kind from a folder, a run folder or a hub id, and checking that it fits the
target.
"""

from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafts.base import Draft, DraftError, check_provenance, read_facts, tuned_target
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import ARCHITECTURE, PICKLED, is_eagle3
from drafttrain.drafts.eagle3_start import check_asked, fitted_to
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.drafts.medusa2 import Medusa2Draft
from drafttrain.drafts.medusa_config import ARCHITECTURE as MEDUSA
from drafttrain.drafts.medusa_config import SEQUENTIAL, MedusaConfig
from drafttrain.drafts.students import build_student
from drafttrain.nn.objective import Objective
from drafttrain.recipe import Recipe, TargetConfig
from drafttrain.target import Target, TargetError, load_target
from drafttrain.target_files import HUB_FILES, download

KINDS = {ARCHITECTURE: Eagle3Draft, MEDUSA: MedusaDraft, SEQUENTIAL: MedusaDraft}
"""By the architecture in config.json; whole causal language models are small drafts (KdDraft)."""
MASTER = "master"
"""Folder of a run's draft that holds the fp32 weights as trained."""


def load_draft(name_or_path: str | Path, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """A Draft in eval mode on the target's device, attached to the target.

    name_or_path: a run folder (its draft/), a checkpoint or export folder, or a hub id. dtype None keeps the stored
    one. Raises DraftError where nothing is found, the kind is unknown, or vocabulary, tokenizer or sizes do not fit
    the target.
    """
    folder = find_draft(name_or_path)
    kind = _kind(folder)
    check_provenance(folder, target)
    if kind is Eagle3Draft:
        return _load_eagle3(folder, target, dtype).eval()
    draft = kind.from_pretrained(folder, dtype).to(target.device).eval().attach(target)
    if isinstance(draft, KdDraft) and not Path(name_or_path).exists():
        draft.name = str(name_or_path)  # Else that of the snapshot's folder, a hash.
    return draft


def _load_eagle3(folder: Path, target: Target, dtype: torch.dtype | None) -> Eagle3Draft:
    """From a folder in any known layout, attached; embeddings that are only a copy of the target's are the target's."""
    draft = Eagle3Draft.from_pretrained(folder, dtype, target.num_layers).to(target.device)
    return draft.attach(target).share_embeddings()


def draft_method(folder: Path) -> str:
    """The method of the draft in a folder: eagle3, .. DraftError where it is none that this version knows."""
    return _kind(folder).method


def _kind(folder: Path) -> type[Draft]:
    facts = read_facts(folder / "config.json")
    if is_eagle3(facts):
        return Eagle3Draft
    architectures = facts.get("architectures")
    name = (architectures or [""])[0]
    if name in KINDS:
        return KINDS[name]
    if name.endswith("ForCausalLM"):
        return KdDraft
    raise DraftError(
        f"{folder / 'config.json'}: architectures is {architectures}. Expected one of {', '.join(KINDS)}, or a causal "
        "language model (..ForCausalLM). Mend: give a draft checkpoint or a small model of the same vocabulary."
    )


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
        folder = download(str(name_or_path), None, HUB_FILES)
    except TargetError as error:
        raise DraftError(f"no draft: {error}") from error
    if not list(folder.glob("*.safetensors")):
        folder = download(str(name_or_path), None, [*HUB_FILES, PICKLED])
    if not (folder / "config.json").exists():
        raise DraftError(f"{name_or_path} on the hub has no config.json. Expected a draft checkpoint.")
    return folder


def load_served(config: TargetConfig, draft_folder: Path) -> Target:
    """The target that a run's draft is served with: the one tuned together with it (Medusa-2), else the recipe's."""
    tuned = tuned_target(draft_folder)
    other = {} if tuned is None else {"name_or_path": str(tuned), "gguf_file": None, "revision": None}
    return load_target(**config.model_dump() | other)


def new_draft(
    recipe: Recipe,
    target: Target,
    feature_layers: list[int],
    draft_ids: Tensor,
    statistics: dict[str, Tensor],
    kept_layers: list[int] | None = None,
) -> Draft:
    """A freshly initialised draft of the recipe's method on the target's device, attached, with its training settings.

    draft_ids int64 [Vd]: the draft vocabulary; statistics: feature_rms [A*Ht] and final_rms [Ht] (methods that read
    features); kept_layers: the layers of a pruned small model. Raises DraftError for what cannot be built.
    """
    if recipe.method == "kd":
        draft = _new_small_model(recipe, target, draft_ids, kept_layers)
    elif recipe.method == "eagle3":
        draft = _new_eagle3(recipe, target, feature_layers, draft_ids, statistics)
        draft.ttt_steps = recipe.training.ttt_steps
        draft.step_decay = recipe.training.step_decay
    else:
        config = MedusaConfig.for_target(target, recipe.draft, len(draft_ids))
        draft = heads = MedusaDraft(config, draft_ids).to(target.device).attach(target).initialise()
        heads.head_decay = recipe.training.step_decay
        if recipe.draft.lora is not None:
            draft = Medusa2Draft.build(heads, target, recipe.draft.lora, recipe.training)
    draft.objective = Objective.from_config(recipe.training)
    return draft


def _new_eagle3(
    recipe: Recipe, target: Target, feature_layers: list[int], draft_ids: Tensor, statistics: dict[str, Tensor]
) -> Eagle3Draft:
    if recipe.draft.init_from is None:
        config = Eagle3Config.for_target(target, recipe.draft, feature_layers, len(draft_ids))
        draft = Eagle3Draft(config, draft_ids).to(target.device).attach(target)
        draft.initialise(**statistics, seed=recipe.training.seed)
    else:
        draft = trained_before(recipe, target)
        if not torch.equal(draft.draft_ids.cpu(), draft_ids) or draft.feature_layers != feature_layers:
            raise DraftError(
                f"draft.init_from is {recipe.draft.init_from}: its vocabulary or its feature layers are not those that "
                f"the data was prepared for ({len(draft_ids)} words, layers {feature_layers}). Mend: prepare again "
                "with --fresh."
            )
    return draft.train_embeddings(recipe.draft.train_embeddings)


def trained_before(recipe: Recipe, target: Target) -> Eagle3Draft:
    """The EAGLE-3 draft of draft.init_from (a run, a folder or a hub id, in any known layout) in fp32, on the target's
    device and attached, with its own vocabulary map and feature layers.

    Of a run its fp32 masters. DraftError where it is another kind, does not fit the target, or has another shape than
    the recipe asks for.
    """
    name = recipe.draft.init_from
    try:
        folder = find_draft(name)
    except DraftError as error:
        raise DraftError(f"draft.init_from: {error}") from error
    kind = _kind(folder)
    if kind is not Eagle3Draft:
        raise DraftError(
            f"draft.init_from is {name}, a draft of method {kind.method}. Expected an EAGLE-3 draft. Mend: check the "
            "path, or leave it out."
        )
    check_provenance(folder, target)
    masters = folder / MASTER
    draft = _load_eagle3(masters if (masters / "config.json").exists() else folder, target, torch.float32)
    check_asked(name, recipe.draft, draft.shape, recipe.features.layers)
    draft.shape, draft.trained_before = fitted_to(draft.shape, target), True
    return draft


def _new_small_model(recipe: Recipe, target: Target, draft_ids: Tensor, kept_layers: list[int] | None) -> KdDraft:
    student = build_student(recipe.draft, target, kept_layers, recipe.training.seed)
    name = recipe.draft.init_from or student_title(recipe, target, kept_layers)
    draft = KdDraft(student, draft_ids, name=name).to(target.device).attach(target)
    return draft.starts_worse_than_guessing() if kept_layers is not None else draft


def student_title(recipe: Recipe, target: Target, kept_layers: list[int] | None) -> str:
    """What a small model made from the target is called in reports."""
    if kept_layers is not None:
        return f"{target.title}, layers {' '.join(map(str, kept_layers))}"
    return f"{target.title}, width {recipe.draft.hidden_size} x {recipe.draft.num_hidden_layers or 'default'} layers"
