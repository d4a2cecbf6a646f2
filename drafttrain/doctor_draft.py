"""Checks of what a draft reads and how: feature layers, the final norm, RoPE. Each fault is looked for by trying what
would be right instead, on the same texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafttrain.doctor_case import Case, Problem, Result, Unmeasured, verdict
from drafttrain.doctor_target import stored_rows
from drafttrain.doctor_words import clearly_better, hits_of, percent, share, with_norm
from drafttrain.drafts.base import read_facts
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_files import feature_layers_of, rope_of
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.loading import MASTER
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.recipe_rules import student_kind

NEAR = 0.1
"""Relative rms error below which a stored state is a recomputed one: bfloat16 and other batch shapes give 1 to 3%."""


FEW = 6
"""Rows that a draft, or what it is tried against, must be right at before one can be told from the other."""


def check_enough(tried: Sequence[Tensor], valid: Tensor) -> None:
    """Unmeasured where the draft and what it was tried against (bool hits of each, over `valid` rows) are both right at
    next to no row.
    """
    most = max(int((hits & valid).sum()) for hits in tried)
    if most < FEW:
        raise Unmeasured(
            f"the draft is right at {int((tried[0] & valid).sum())} of {int(valid.sum())} rows, and no neighbour at "
            f"more than {most}: too few to tell what fits better. Train it longer, or give more --samples"
        )


def eagle3(case: Case) -> Eagle3Draft:
    """The case's draft, where it is an EAGLE-3 one; Unmeasured for the others."""
    if not isinstance(case.draft, Eagle3Draft):
        raise Unmeasured(f"{case.draft.method}: a draft that reads no layers of the target by number")
    return case.draft


# layers


def layers(case: Case) -> Result:
    """The layers that config.json declares against those trained on, against each export's, and against their
    neighbours: acceptance at step 1 with all layers one lower or one higher. The neighbour must be clearly better
    (McNemar, `clearly_better`), since the residual stream changes little from layer to layer.
    """
    draft, texts = eagle3(case), case.texts
    declared, n = draft.feature_layers, case.target.num_layers
    problems: list[Problem] = []
    trained = case.trained_layers
    if trained is not None and trained != declared:
        problems.append((f"config.json declares layers {declared}, the run was trained on {trained}", written(trained)))
    problems += _exports(case, declared)
    valid, own = texts.valid(1), hits_of(draft, texts, 1)
    tried = [own]
    told = [f"declared {declared} {percent(share(own, valid))}"]
    found = {}
    for shift, name in ((-1, "one lower"), (1, "one higher")):
        moved = [k + shift for k in declared]
        if moved[0] >= 0 and moved[-1] <= n:
            hits = hits_of(draft, texts, 1, layers=moved)
            tried.append(hits)
            found[shift] = share(hits, valid)
            told.append(f"{name} {moved} {percent(found[shift])}")
            if clearly_better(hits, own):
                problems.append((f"off by one: layers {moved} fit better than the declared {declared}", written(moved)))
    problems += _stored_layers(case, declared)
    if not problems:
        check_enough(tried, valid)
    evidence = f"acceptance at step 1 over {int(valid.sum())} rows: {', '.join(told)}"
    return verdict(problems, [evidence], declared=declared, trained=trained, shifted=found, rows=int(valid.sum()))


def written(ids: Sequence[int]) -> str:
    """The mend that names layer ids, in both conventions."""
    return (
        f"write eagle_aux_hidden_state_layer_ids {list(ids)} (nested, for SGLang: {[k - 1 for k in ids]}), or export "
        "again"
    )


def _exports(case: Case, declared: Sequence[int]) -> Iterator[Problem]:
    folders = sorted((case.run.path / "export").glob("*")) if case.recipe else []
    for folder in [case.folder, *folders]:
        path = folder / "config.json"
        if not path.exists():
            continue
        values = read_facts(path)
        said = feature_layers_of(values, case.target.num_layers)
        nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if said != list(declared):
            yield f"{folder} declares layers {said}, the draft reads {list(declared)}", written(declared)
        elif nested and nested != [k - 1 for k in said]:
            found = f"{folder}: the nested ids are {nested}, expected one less than {said}, {[k - 1 for k in said]}"
            yield found, written(declared)


def _stored_layers(case: Case, declared: Sequence[int]) -> Iterator[Problem]:
    """Stored features that are another layer's than the run says."""
    for row, stored in stored_rows(case, 1):
        if "features" not in stored:
            return
        states = _states(case, row)
        width = case.target.hidden_size
        for k, part in zip(case.trained_layers or declared, stored["features"].split(width, -1), strict=False):
            near = {j: _error(part, states[j]) for j in range(max(0, k - 1), min(len(states), k + 2))}
            best = min(near, key=near.get)
            if best != k and near[best] < NEAR < near[k]:
                mend = "remove prepared/features, prepare again, train again"
                yield f"the stored features of layer {k} are hs[{best}] (off by {percent(near[best])})", mend


@torch.no_grad()
def _states(case: Case, row: dict) -> list[Tensor]:
    """hs[0] to hs[n] of a row, [T, Ht] each."""
    found = case.target.hidden_states(torch.tensor([row["input_ids"]]), None, range(case.target.num_layers + 1))
    return [found[k][0].float().cpu() for k in sorted(found)]


def _error(stored: Tensor, state: Tensor) -> float:
    """Relative rms error, position 0 left out: what lies there is huge in every layer."""
    wanted = state[1 : len(stored)]
    return float((stored[1:].float() - wanted).norm() / wanted.norm().clamp_min(1e-9))


# norm


def norm(case: Case) -> Result:
    """Whether what is read behind the last layer is the un-normed residual stream hs[n].

    Stored states are compared with hs[n] and its norm; a draft that reads the last layer, or heads behind the norm, are
    tried with the other one: clearly better acceptance is the fault.
    """
    draft, n, problems = case.draft, case.target.num_layers, []
    evidence = list(_stored_norm(case, problems))
    if isinstance(draft, MedusaDraft):
        evidence.append(_other_norms(case, draft, problems))
    elif isinstance(draft, Eagle3Draft) and n in draft.feature_layers:
        texts = case.texts
        own = hits_of(draft, texts, 1)
        kept = [texts.states[k] for k in draft.feature_layers[:-1]]
        normed = torch.cat([*kept, case.target.head().normed(texts.last)], -1)
        other = hits_of(draft, texts, 1, features=normed)
        valid = texts.valid(1)
        evidence.append(
            f"hs[{n}] un-normed {percent(share(own, valid))}, behind the final norm {percent(share(other, valid))}"
        )
        if clearly_better(other, own):
            found = f"the features of layer {n} were taken behind the final norm when this draft was trained"
            problems.append((found, "train on hs[n] before the norm, which engines hand over"))
    elif not evidence:
        if not isinstance(draft, Eagle3Draft):
            raise Unmeasured(f"{draft.method}: a draft that reads no states of the target, and none are stored")
        evidence.append(
            f"layers {draft.feature_layers} of {n}: the last one, behind which the norm stands, is not read"
        )
    return verdict(problems, evidence)


def _stored_norm(case: Case, problems: list[Problem]) -> Iterator[str]:
    for row, stored in stored_rows(case, 1):
        if "last_hidden" not in stored:
            return
        state = _states(case, row)[case.target.num_layers]
        normed = case.target.head().normed(state.to(case.target.device)).float().cpu()
        plain, behind = _error(stored["last_hidden"], state), _error(stored["last_hidden"], normed)
        yield f"stored last states are off hs[n] by {percent(plain)}, off its norm by {percent(behind)}"
        if behind < NEAR < plain:
            mend = "remove prepared/features, store hs[n] before the norm (drafttrain prepare), train again"
            problems.append(("the stored last states are behind the final norm, which the head applies again", mend))


class Twice(nn.Module):
    """The final norm of its own output."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.inner(hidden))


def _other_norms(case: Case, draft: MedusaDraft, problems: list[Problem]) -> str:
    texts, norms = case.texts, draft.teacher.norm
    valid, own = texts.valid(1), hits_of(draft, texts, 1)
    told = [f"heads behind the final norm {percent(share(own, valid))}"]
    for what, other in (("before it", nn.Identity()), ("behind it twice", Twice(norms))):
        hits = hits_of(with_norm(draft, other), texts, 1)
        told.append(f"{what} {percent(share(hits, valid))}")
        if clearly_better(hits, own):
            found = f"these heads fit states {what.replace('it', 'the final norm')} better than those behind it"
            problems.append((found, "train on norm(hs[n]), which engines hand to Medusa heads"))
    return ", ".join(told)


# rope


def rope(case: Case) -> Result:
    """Theta, scaling and head_dim of the draft's config against the masters', the recipe's and the target's.

    Each other value is tried on the answers and on long texts of them, at whose late positions theta counts most:
    clearly better is the fault. A draft that was trained with another theta than the target's keeps it, and passes.
    Small models have positions of their own; one cut from the target must have the target's.
    """
    draft = case.draft
    if isinstance(draft, MedusaDraft):
        raise Unmeasured("Medusa heads have no attention, and no rotary positions")
    if isinstance(draft, KdDraft):
        return _small_rope(case, draft)
    assert isinstance(draft, Eagle3Draft)
    shape, length = draft.shape, case.documents.input_ids.shape[1]
    own, whole, late = _everywhere(case, draft)
    problems: list[Problem] = []
    evidence = [
        f"theta {shape.rope_theta:g}, scaling {_kind(shape.rope_scaling)}, head_dim {shape.head_dim}; acceptance at "
        f"step 1 {percent(share(own, whole))}, in the later half of {length} positions {percent(share(own, late))}"
    ]
    tried = [own]
    for what, changes in _other_shapes(case, shape):
        hits, *_ = _everywhere(case, reshaped(draft, case, **changes))
        tried.append(hits)
        said = ", ".join(
            f"{key} {_kind(value) if key == 'rope_scaling' else f'{value:g}'}" for key, value in changes.items()
        )
        told = f"with {said} ({what}): {percent(share(hits, whole))}, later half {percent(share(hits, late))}"
        if clearly_better(hits, own):
            found = f"{told}, against {percent(share(own, whole))} as declared"
            problems.append((found, f"write {said} into config.json"))
        else:
            evidence.append(told)
    if not problems:
        check_enough(tried, whole)
    return verdict(problems, evidence, theta=shape.rope_theta, head_dim=shape.head_dim)


def _everywhere(case: Case, draft: Eagle3Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Over the answers and the long texts: hits at step 1, rows that count, those in the later half of the long texts;
    bool [R] each.
    """
    parts = []
    for texts in (case.texts, case.documents):
        valid = texts.valid(1)
        T = valid.shape[-1]
        behind = torch.arange(T, device=valid.device) >= (T // 2 if texts is case.documents else T)
        parts.append((hits_of(draft, texts, 1).flatten(), valid.flatten(), (valid & behind).flatten()))
    hits, whole, late = (torch.cat(column) for column in zip(*parts, strict=True))
    return hits, whole, late


def _kind(scaling: dict | None) -> str:
    return "none" if scaling is None else str(scaling.get("rope_type"))


def _other_shapes(case: Case, shape: Eagle3Config) -> Iterator[tuple[str, dict]]:
    """What else the positions could have been, where the sizes of the weights allow it."""
    path = case.folder / MASTER
    sources = [("as the masters say", Eagle3Config.load(path))] if (path / "config.json").exists() else []
    width = shape.head_dim * shape.num_attention_heads
    tried: list[dict] = []
    target = case.target.rope()
    options = [
        (what, {name: vars(other)[name] for name in ("rope_theta", "rope_scaling")}, other.head_dim)
        for what, other in sources
    ]
    dims = {case.target.head_dim, case.recipe.draft.head_dim if case.recipe else None} - {None}
    options += [("the target's", target, dim) for dim in sorted(dims)] + [("the target's", target, shape.head_dim)]
    for what, rotary, dim in options:
        changes = {key: value for key, value in rotary.items() if value != vars(shape)[key]}
        keys = shape.num_key_value_heads * shape.head_dim
        if dim != shape.head_dim and width % dim == 0 and keys % dim == 0 and (width // dim) % (keys // dim) == 0:
            changes["head_dim"] = dim
        for part in [changes, {"head_dim": dim}] if len(changes) > 1 and "head_dim" in changes else [changes]:
            if part and part not in tried:
                tried.append(part)
                yield what, part


def reshaped(draft: Eagle3Draft, case: Case, **changes) -> Eagle3Draft:
    """The same weights in another shape: rope_theta, rope_scaling, or head_dim with as many heads as fit."""
    shape = draft.shape
    if "head_dim" in changes:
        heads, keys = (
            count * shape.head_dim // changes["head_dim"]
            for count in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        changes |= {"num_attention_heads": heads, "num_key_value_heads": keys}
    other = Eagle3Draft(replace(shape, **changes), draft.draft_ids.cpu())
    other.to(draft.d2t.device, draft.fc.weight.dtype).load_state_dict(draft.state_dict())
    other.feature_rms = draft.feature_rms
    return other.eval().attach(case.target)


def _small_rope(case: Case, draft: KdDraft) -> Result:
    if case.recipe is None or student_kind(case.recipe.draft) != "pruned":
        raise Unmeasured("a small model with positions of its own: the target's say nothing about them")
    told, problems = [], []
    theirs, ours = (rope_of(config.to_dict()) for config in (case.target.config, draft.shape))
    values = [("theta", ours[0], theirs[0]), ("scaling", ours[1], theirs[1])]
    values.append(("head_dim", draft.small_target().head_dim, case.target.head_dim))
    for what, mine, other in values:
        told.append(f"{what} {mine}")
        if mine != other:
            found = f"the small model, cut from the target, has {what} {mine}, the target {other}"
            problems.append((found, f"write the target's {what} into the draft's config.json, or export again"))
    return verdict(problems, [", ".join(told) + ", the target's are the same"] if not problems else [])
