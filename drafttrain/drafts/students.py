"""The students of distillation: the target with layers left out, a narrow new model, or a sibling, with adapters or
without; and which layers to keep.

A layer's influence is 1 - mean cosine between the hidden states before and behind it (ShortGPT, arXiv 2403.03853).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from drafttrain.drafts.adapters import add_adapters, chosen_linears, merged
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.fresh_student import LAYER_LISTS, fresh_config, fresh_student, spread
from drafttrain.drafts.small_model import PER_LAYER, prune_layers
from drafttrain.drafts.student_parts import (
    body_names,
    check_rebuildable,
    run_student,
    set_trained,
    table_names,
    text_model,
)
from drafttrain.drafts.vocabulary import align_vocabulary, check_tokenizers, token_count
from drafttrain.recipe import DraftConfig
from drafttrain.recipe_rules import student_kind
from drafttrain.target import Target, TargetError, load_target
from drafttrain.target_files import load_tokenizer

__all__ = [
    "align_vocabulary",
    "build_student",
    "check_kept",
    "check_student",
    "check_tokenizers",
    "choose_layers",
    "fresh_config",
    "kept_layers",
    "layer_influence",
    "load_sibling",
    "merged",
    "run_student",
    "student_kind",
    "token_count",
]

PROBE_TOKENS = 4000
ROW_TOKENS = 512
"""Tokens that a layer's influence is measured on, and how many of one row."""


def choose_layers(target: Target, count: int, how: str, rows: Sequence[Sequence[int]] = ()) -> list[int]:
    """The `count` layers to keep, 0-based and ascending, the first and the last always among them.

    how: "even" (at even distances), or "importance" (the most influential between first and last, measured on rows of
    token ids). DraftError for counts that cannot be, and for importance without rows.
    """
    check_count(count, target)
    n = target.num_layers
    if how == "even" or count == n:
        return spread(n, count)
    assert how == "importance", how
    influence = layer_influence(target, rows)
    inner = sorted(range(1, n - 1), key=lambda i: (-influence[i], i))[: max(0, count - 2)]
    return sorted({0, n - 1, *inner})


def check_count(count: int, target: Target) -> None:
    """DraftError unless so many of the target's layers can be kept."""
    n = target.num_layers
    if not min(2, n) <= count <= n:
        what = "which would be pruning away all layers" if count < 1 else f"of the {n} that {target.title} has"
        raise DraftError(
            f"draft.num_hidden_layers keeps {count} layers, {what}. Expected {min(2, n)}..{n}: the first and the last "
            "are always kept. Mend: another draft.num_hidden_layers."
        )


@torch.no_grad()
def layer_influence(target: Target, rows: Sequence[Sequence[int]]) -> list[float]:
    """1 - mean cosine(hs[i], hs[i+1]) of each layer i over about 4,000 tokens of the rows, spread evenly.

    Position 0 is left out: what lies there is huge in every model and the same in every row. DraftError without
    tokens.
    """
    usable = [row[:ROW_TOKENS] for row in rows if len(row) > 1]
    if not usable:
        raise DraftError(
            "draft.choose_layers is importance and there are no rows of two tokens or more to measure it on. "
            "Expected training data. Mend: prepare the data first, or draft.choose_layers: even."
        )
    mean = sum(len(row) - 1 for row in usable) / len(usable)
    chosen = spread(len(usable), min(len(usable), math.ceil(PROBE_TOKENS / mean)))
    n = target.num_layers
    sums, count = torch.zeros(n, dtype=torch.float64), 0
    for index in chosen:
        states = target.hidden_states(torch.tensor([list(usable[index])]), None, range(n + 1))
        for i in range(n):
            before, behind = states[i][0, 1:].float(), states[i + 1][0, 1:].float()
            sums[i] += F.cosine_similarity(before, behind.to(before.device), dim=-1).double().sum().cpu()
        count += len(usable[index]) - 1
    return (1 - sums / count).tolist()


def check_kept(layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers as a list; DraftError unless they ascend, are distinct, in 0 .. n-1 and hold both ends."""
    kept, last = list(layers), num_layers - 1
    if not kept:
        raise DraftError(
            "draft.keep_layers is empty, which would be pruning away all layers. Expected at least the first and the "
            f"last. Mend: draft.keep_layers: [0, {last}]."
        )
    if sorted(set(kept)) != kept or kept[0] != 0 or kept[-1] != last:
        proper = sorted({0, last, *(i for i in kept if 0 <= i <= last)})
        raise DraftError(
            f"draft.keep_layers is {kept}. Expected ascending distinct numbers from 0 to {last}, both among them: the "
            f"first and the last of {num_layers} layers are always kept. Mend: draft.keep_layers: {proper}."
        )
    return kept


def kept_layers(settings: DraftConfig, target: Target, rows: Sequence[Sequence[int]] = ()) -> list[int]:
    """The layers of the target that a pruned student keeps, as the settings say; a third of them unless given.

    rows of token ids: what their importance is measured on. DraftError as `check_kept` and `choose_layers`.
    """
    if settings.keep_layers is not None:
        return check_kept(settings.keep_layers, target.num_layers)
    return choose_layers(target, _count(settings, target), settings.choose_layers, rows)


def _count(settings: DraftConfig, target: Target) -> int:
    return settings.num_hidden_layers or min(target.num_layers, max(2, target.num_layers // 3))


def check_student(settings: DraftConfig, target: Target) -> None:
    """DraftError, before data is prepared, for a student that `build_student` would refuse; TargetError for a sibling
    whose tokenizer is not there.
    """
    kind = student_kind(settings)
    if kind == "fresh":
        fresh_config(settings, target)
    elif kind == "sibling":
        tokenizer = None if settings.init_from is None else _found(load_tokenizer, settings.init_from)
        check_tokenizers(tokenizer, target, target.vocab_size)
    elif settings.keep_layers is not None:
        check_kept(settings.keep_layers, target.num_layers)
    else:
        check_count(_count(settings, target), target)
    if kind == "pruned" and settings.lora is not None:
        chosen_linears(target.model, settings.lora.target_modules)


def build_student(
    settings: DraftConfig, target: Target, layers: Sequence[int] | None = None, seed: int = 0
) -> PreTrainedModel:
    """The student in eval mode on the target's device, with the target's vocab_size. Run it with `run_student`.

    layers: those that a pruned student keeps (`kept_layers`). What trains is fp32 with requires_grad: decoder layers
    and final norm, or the adapters alone; embedding and head too for fresh ones and siblings, or as train_embeddings
    says. All else is frozen; of a pruned student these are the target's own tensors, without a copy. DraftError for
    settings that fit neither each other nor the target.
    """
    kind = student_kind(settings)
    if kind == "fresh":
        if settings.lora is not None:
            raise DraftError(
                "draft.lora is set for a fresh student, whose layers are random. Expected a pruned student or a "
                "sibling. Mend: leave draft.lora out."
            )
        return fresh_student(settings, target, seed)
    if kind == "pruned":
        model = text_model(_pruned(target, check_kept([] if layers is None else layers, target.num_layers)))
    else:
        model = text_model(load_sibling(settings, target).model)
    tables = settings.train_embeddings
    if tables is None:
        tables = kind == "sibling" and settings.lora is None
    names = set()
    if settings.lora is None:
        # A pruned student's other parts, where a family has some, are shared with the target.
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names = body_names(model) if kind == "pruned" else every - table_names(model)
    set_trained(model, names | table_names(model) if tables else names)
    if settings.lora is not None:
        add_adapters(model, settings.lora, seed)
    return model


def _pruned(source: Target, kept: list[int]) -> PreTrainedModel:
    """The source's model with these layers alone, around the same tensors, with a config that says so."""
    model = prune_layers(source, kept).model
    config = model.config.get_text_config(decoder=True)
    values = config.to_dict()
    for name in set(LAYER_LISTS) - set(PER_LAYER):
        if values.get(name) is not None:
            setattr(config, name, [values[name][i] for i in kept])
    check_rebuildable(text_model(model))
    return model


def _found(load: Callable[..., Any], name: str, **options) -> Any:
    """load(name), whose TargetError says which setting named it."""
    try:
        return load(name, **options)
    except TargetError as error:
        raise TargetError(f"draft.init_from: {error}") from error


def load_sibling(settings: DraftConfig, target: Target) -> Target:
    """The model of draft.init_from (folder, hub id or .gguf) in the target's dtype and on its device, with its
    vocabulary.

    TargetError where it cannot be read, DraftError where its tokenizer is another.
    """
    if settings.init_from is None:
        raise DraftError(
            "draft.student is sibling and draft.init_from is not given. Expected a folder, a hub id or a .gguf file. "
            "Mend: draft.init_from: the small model to start from."
        )
    dtype = str(target.dtype).removeprefix("torch.")
    sibling = _found(load_target, settings.init_from, dtype=dtype, device=str(target.device))
    check_tokenizers(sibling.tokenizer, target, sibling.vocab_size)
    if sibling.vocab_size == target.vocab_size:
        return sibling
    tokens = token_count(sibling.tokenizer)
    model = align_vocabulary(sibling.model, target.vocab_size, tokens)
    return Target(model, sibling.tokenizer, sibling.name, sibling.folder)
