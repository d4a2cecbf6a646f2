"""Every typed setting of a run: a YAML recipe becomes one validated `Recipe`, with dotted overrides.

Unknown keys are errors with a suggestion; every problem of a recipe is reported at once, in one RecipeError.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from drafttrain.errors import UserError
from drafttrain.recipe_problems import problem_lines, shown
from drafttrain.recipe_rules import contradictions
from drafttrain.recipe_sections import (
    DataConfig,
    DataEntry,
    DraftConfig,
    EvaluationConfig,
    ExportConfig,
    FeaturesConfig,
    LoraConfig,
    LossName,
    OnPolicyConfig,
    RegenerateConfig,
    Section,
    SplitName,
    StorageDtype,
    TargetConfig,
    TrainingConfig,
    TreeConfig,
    VllmConfig,
)

__all__ = [
    "DataConfig",
    "DataEntry",
    "DraftConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FeaturesConfig",
    "LoraConfig",
    "LossName",
    "OnPolicyConfig",
    "Recipe",
    "RecipeError",
    "RegenerateConfig",
    "Section",
    "SplitName",
    "StorageDtype",
    "TargetConfig",
    "TrainingConfig",
    "TreeConfig",
    "VllmConfig",
    "load_recipe",
    "override_recipe",
    "parse_evaluation",
    "parse_recipe",
    "recipe_difference",
    "recipe_to_yaml",
    "save_recipe",
]


class RecipeError(UserError):
    """A recipe, or an override of one, that cannot be used. One line per problem."""


class Recipe(Section):
    """One whole run. Compare two with `recipe_difference`: `==` also compares the files they came from."""

    method: Literal["eagle3", "medusa", "kd"]
    target: TargetConfig
    data: DataConfig
    draft: DraftConfig = DraftConfig()
    features: FeaturesConfig = FeaturesConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    _source_path: Path | None = PrivateAttr(default=None)

    @property
    def source_path(self) -> Path | None:
        """The file that the recipe was read from, or None for one made in memory."""
        return self._source_path

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        value = {key: item for key, item in value.items() if item is not None}  # `training:` with nothing below it
        if isinstance(value.get("target"), str):
            value["target"] = {"name_or_path": value["target"]}
        data = value.get("data")
        draft = value.get("draft")
        own_heads = isinstance(draft, Mapping) and draft.get("own_heads") is True
        whole = value.get("method") == "kd" or (value.get("method") == "medusa" and own_heads)
        if whole and isinstance(data, Mapping) and "draft_vocab" not in data:
            value["data"] = {**data, "draft_vocab": None}  # Engines serve small models with the whole vocabulary.
        return value


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe, apply overrides such as "training.learning_rate=1e-4" or "data.train.0.path=x", validate.

    Relative paths (also those of overrides) are resolved against the recipe's folder: data paths always; the target,
    `draft.init_from` and `evaluation.prompts` when they start with ./ or ../ or exist there.
    Raises RecipeError for a missing file, broken YAML, an impossible override, or any invalid setting.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: {reason}; expected a YAML recipe") from error
    settings = _read_yaml(text, str(path))
    if not isinstance(settings, dict):
        raise RecipeError(f"{path}: found {shown(settings)}, expected a mapping with method, target and data")
    return _finish(settings, overrides, path.absolute().parent, path.absolute(), str(path))


def parse_recipe(settings: Mapping[str, Any], folder: str | os.PathLike[str] = ".") -> Recipe:
    """Validate settings given in memory; relative paths are resolved against `folder`. Raises RecipeError."""
    return _finish(settings, (), Path(folder).absolute(), None, "recipe")


class _EvaluationAlone(Section):
    evaluation: EvaluationConfig


def parse_evaluation(settings: Mapping[str, Any]) -> EvaluationConfig:
    """The evaluation section alone, from settings given in memory. Raises RecipeError."""
    try:
        return _EvaluationAlone.model_validate({"evaluation": dict(settings)}).evaluation
    except ValidationError as error:
        lines = problem_lines(error, _EvaluationAlone)
        raise RecipeError("\n".join(["the evaluation cannot be run as asked:", *lines])) from error


def override_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A copy of the recipe with dotted overrides applied, validated anew. Raises RecipeError."""
    source = recipe.source_path
    folder = Path.cwd() if source is None else source.parent
    return _finish(recipe.model_dump(), overrides, folder, source, str(source or "recipe"))


def recipe_to_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back to the same settings."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def save_recipe(recipe: Recipe, path: str | os.PathLike[str]) -> None:
    """Write the recipe beside its final name, then rename. Raises RecipeError where it cannot be written."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(recipe_to_yaml(recipe), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}; expected a place where the recipe can be written") from error


def recipe_difference(first: Recipe, second: Recipe) -> list[str]:
    """One line "dotted.key: value of the first -> value of the second" for every setting that differs."""
    return list(_differences(first.model_dump(), second.model_dump(), ""))


def _are_entries(first: list, second: list) -> bool:
    return len(first) == len(second) and all(isinstance(item, dict) for item in first + second)


def _differences(first: Any, second: Any, key: str) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in first:
            yield from _differences(first[name], second[name], f"{key}.{name}" if key else name)
    elif isinstance(first, list) and isinstance(second, list) and _are_entries(first, second):
        for index, (left, right) in enumerate(zip(first, second, strict=True)):
            yield from _differences(left, right, f"{key}.{index}")
    elif first != second:
        yield f"{key}: {first!r} -> {second!r}"


class _Loader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for index, (key, _) in enumerate(node.value):
            if key.value in names[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        where, what = "", str(error).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            where, what = f"line {error.problem_mark.line + 1}: ", error.problem
        raise RecipeError(f"{source}: {where}not readable as YAML: {what}") from error


def _finish(
    settings: Mapping[str, Any], overrides: Sequence[str], folder: Path, path: Path | None, name: str
) -> Recipe:
    for override in overrides:
        settings = _overridden(settings, override)
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        raise RecipeError("\n".join([f"{name} is not a valid recipe:", *problem_lines(error, Recipe)])) from error
    problems = [f"  {line}" for line in contradictions(recipe)]
    if problems:
        raise RecipeError("\n".join([f"{name} is not a valid recipe:", *problems]))
    recipe = _resolved(recipe, folder)
    recipe._source_path = path
    return recipe


def _overridden(settings: Mapping[str, Any], override: str) -> Mapping[str, Any]:
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"override {override!r}: expected key=value, such as training.learning_rate=1e-4")
    if parts[0] == "target" and len(parts) > 1 and isinstance(settings.get("target"), str):
        settings = {**settings, "target": {"name_or_path": settings["target"]}}
    return _with_value(settings, parts, _read_yaml(text, f"override {override!r}"), override)


def _with_value(node: Any, parts: list[str], value: Any, override: str) -> Any:
    """A copy of `node` in which the place named by `parts` holds `value`; missing levels are made on the way."""
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if node is None:
        node = [] if part.isdecimal() else {}
    if isinstance(node, Mapping):
        return {**node, part: _with_value(node.get(part), rest, value, override)}
    if not isinstance(node, list):
        raise RecipeError(f"override {override!r}: {part!r} lies below the value {shown(node)}, expected a section")
    if not part.isdecimal() or int(part) > len(node):
        raise RecipeError(f"override {override!r}: found {part!r}, expected an index from 0 to {len(node)}")
    index = int(part)
    old = node[index] if index < len(node) else None
    return [*node[:index], _with_value(old, rest, value, override), *node[index + 1 :]]


def _resolved(recipe: Recipe, folder: Path) -> Recipe:
    def absolute(path: str) -> str:
        return os.path.normpath(folder / Path(path).expanduser())

    def name_or_path(name: str | None) -> str | None:
        if name is None:
            return None
        local = name.startswith(("./", "../", "~")) or (folder / name).exists()
        return absolute(name) if local else name

    def entry(item: DataEntry) -> DataEntry:
        return item if item.path is None else item.model_copy(update={"path": absolute(item.path)})

    def features(section: FeaturesConfig) -> FeaturesConfig:
        if section.vllm is None:
            return section
        paths = {name: getattr(section.vllm, name) for name in ("python", "folder")}
        paths = {name: absolute(path) for name, path in paths.items() if path is not None}
        return section.model_copy(update={"vllm": section.vllm.model_copy(update=paths)})

    data, draft, evaluation, target = recipe.data, recipe.draft, recipe.evaluation, recipe.target
    splits = {split: [entry(item) for item in getattr(data, split)] for split in get_args(SplitName)}
    return recipe.model_copy(
        update={
            "target": target.model_copy(update={"name_or_path": name_or_path(target.name_or_path)}),
            "data": data.model_copy(update=splits),
            "draft": draft.model_copy(update={"init_from": name_or_path(draft.init_from)}),
            "features": features(recipe.features),
            "evaluation": evaluation.model_copy(update={"prompts": name_or_path(evaluation.prompts)}),
        }
    )
