"""`drafttrain init`: a commented recipe for any target, from its config alone."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import yaml

from drafttrain.data.files import write_beside
from drafttrain.init_facts import Facts, InitError, read_facts
from drafttrain.init_families import Student, check_prunable, find_sibling
from drafttrain.init_memory import Batch, largest_batch
from drafttrain.init_numbers import check_rotary, draft_shape, feature_layers, max_length
from drafttrain.init_text import Plan, recipe_text
from drafttrain.recipe import Recipe, load_recipe, parse_recipe

__all__ = ["InitError", "default_path", "make_recipe", "placed", "read_facts", "write_recipe"]

METHODS = get_args(Recipe.model_fields["method"].annotation)
MEMORY = 80.0
"""GiB of the GPU that batches are made for: an A100 or H100."""
PADDING = 1024
"""Words by which two models of one tokenizer may differ, as each pads its tables otherwise."""


def make_recipe(
    facts: Facts,
    method: str,
    data: tuple[Sequence[str], Sequence[str], Sequence[str]] = ((), (), ()),
    memory: float = MEMORY,
    sibling: str | None = None,
) -> str:
    """The text of the recipe. data: (train, validation, test) files, all empty for a public set of conversations;
    memory: GiB of one GPU; sibling: a small model of the same vocabulary to distil (method kd).

    InitError for a method that the target has no draft of.
    """
    if method not in METHODS:
        raise InitError(f"--method is {method!r}; expected one of {', '.join(METHODS)}")
    if not 1 <= memory <= 10_000:
        raise InitError(f"--memory is {memory:g}; expected GiB of one GPU, such as 24 or 80")
    if any(data) and not data[0]:
        raise InitError("--validation or --test without --data; expected the files to train on as well")
    if sibling is not None and method != "kd":
        raise InitError(f"--sibling is {sibling!r}, which is for --method kd; this is {method}")
    shape, student = draft_shape(facts), None
    if method == "eagle3":
        feature_layers(facts.layers)
        check_rotary(facts)
    elif method == "kd":
        student = _student(facts, sibling)
    plan = Plan(method, data, memory, shape, Batch(max_length(facts)), student)
    recipe = parse_recipe(yaml.safe_load(recipe_text(facts, plan)))  # All but the batch, which follows from it.
    outline = student.outline if isinstance(student, Student) else None
    return recipe_text(facts, replace(plan, batch=largest_batch(facts, recipe, memory, outline)))


def _student(facts: Facts, name: str | None) -> Student | int:
    """A sibling, or how many layers a pruned one keeps."""
    if name is not None:
        given = read_facts(name)
        if abs(given.vocab - facts.vocab) > PADDING:
            raise InitError(
                f"--sibling {name} has {given.vocab:,} words, the target {facts.vocab:,}; expected the same"
            )
        return Student(given.name, given.parameters, given.outline)
    known = find_sibling(facts)
    if known is not None:
        return known.student()
    count = max(2, facts.layers // (3 if facts.parameters < 1e9 else 8))
    check_prunable(facts, count)
    return count


def placed(files: Sequence[str], folder: Path) -> list[str]:
    """The files as a recipe in `folder` names them; InitError for one that is not there."""
    missing = [file for file in files if not Path(file).expanduser().exists()]
    if missing:
        raise InitError(f"No file at {missing[0]}. Mend: check --data, --validation and --test")
    return [os.path.relpath(Path(file).expanduser(), folder) for file in files]


def default_path(facts: Facts, method: str) -> Path:
    """`<method>-<target>.yaml`, in the folder one is in."""
    last = facts.title.removesuffix(".gguf").rstrip("/").rsplit("/", 1)[-1]
    return Path(f"{method}-{last.lower()}.yaml")


def write_recipe(text: str, path: Path, overwrite: bool = False) -> Recipe:
    """Write the recipe and read it back, as its next user will; paths in it are relative to its folder.

    InitError where a file is there already, or none can be written.
    """
    if path.exists() and not overwrite:
        raise InitError(f"{path} exists. Mend: --output ANOTHER, or --overwrite")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise InitError(f"{path} cannot be written ({error.strerror}). Mend: another --output") from error
    return load_recipe(path)
