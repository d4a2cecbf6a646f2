"""Every typed setting of a run: a YAML recipe becomes one validated `Recipe`, with dotted overrides.

Unknown keys are errors with a suggestion; every problem of a recipe is reported at once, in one RecipeError.
"""

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from drafttrain.errors import UserError
from drafttrain.recipe_problems import problem_lines, shown


class RecipeError(UserError):
    """A recipe, or an override of one, that cannot be used. One line per problem."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int | float | str) else value


def _printable(value: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value):
        raise ValueError("expected text without line breaks and control characters")
    return value


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
Counts = Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
Temperatures = Annotated[list[NonNegative], BeforeValidator(_listed), Field(min_length=1)]
Names = Annotated[list[Text], BeforeValidator(_listed)]
StorageDtype = Literal["bfloat16", "float16", "float32"]
SplitName = Literal["train", "validation", "test"]


class Section(BaseModel):
    """Base of every group of settings: frozen, unknown keys forbidden, no infinities, no booleans as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("expected a value that is not true or false")
        return value


class TargetConfig(Section):
    """The frozen model that serves: a hub id, a folder, or a GGUF file. A bare string stands for `name_or_path`."""

    name_or_path: Text
    gguf_file: Text | None = None
    revision: Text | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Text = "auto"
    device_map: Text | None = None
    attn_implementation: Text | None = None
    trust_remote_code: bool = False


class DataEntry(Section):
    """One source of conversations: a local `path` or a `datasets` hub id. `weight` < 1 subsamples, > 1 repeats."""

    path: Text | None = None
    dataset: Text | None = None
    name: Text | None = None
    split: Text = "train"
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "text", "tokens"] = "auto"
    weight: Positive = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> "DataEntry":
        if (self.path is None) == (self.dataset is None):
            found = "neither" if self.path is None else f"path {self.path!r} and dataset {self.dataset!r}"
            raise ValueError(f"found {found}, expected exactly one of path and dataset")
        return self


class RegenerateConfig(Section):
    """How the target answers the prompts itself before training; rows take the temperatures in turn."""

    max_new_tokens: Count = 512
    temperature: Temperatures = [0.0]
    top_k: Natural = 0
    top_p: Share = 1.0
    batch_size: Count = 64
    seed: Natural = 0
    splits: Annotated[list[SplitName], BeforeValidator(_listed)] = ["train", "validation"]


class DataConfig(Section):
    """Conversations, their lengths in tokens, and the draft vocabulary (None keeps the target's whole vocabulary)."""

    train: Annotated[list[DataEntry], Field(min_length=1)]
    validation: list[DataEntry] = []
    test: list[DataEntry] = []
    max_length: Count = 2048
    chat: Literal["auto", "template", "none"] = "auto"
    regenerate: RegenerateConfig | None = None
    draft_vocab: Count | None = 32000
    seed: Natural = 0


class DraftConfig(Section):
    """Shape of the draft. None takes the target's own value. `init_from` is a checkpoint to start from."""

    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    norm_before_residual: bool = False
    init_from: Text | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> "DraftConfig":
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and groups is not None and heads % groups:
            raise ValueError(f"found num_attention_heads {heads}, expected a multiple of num_key_value_heads {groups}")
        return self


class FeaturesConfig(Section):
    """Where the target's hidden states come from and which hs[k] the draft reads (None: [2, n//2, n-3])."""

    source: Literal["online", "store"] = "online"
    layers: Annotated[list[Natural], Field(min_length=1)] | None = None
    dtype: StorageDtype = "bfloat16"
    batch_tokens: Count = 4096

    @field_validator("layers")
    @classmethod
    def _distinct(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and len(set(layers)) < len(layers):
            raise ValueError(f"found {layers}, expected distinct layers")
        return layers


class TrainingConfig(Section):
    """Names and meanings of transformers.TrainingArguments, except the batch, which is counted in tokens."""

    num_train_epochs: Positive = 3.0
    max_steps: Annotated[int, Field(ge=-1)] = -1
    max_minutes: Positive | None = None
    learning_rate: Positive = 1e-4
    warmup_steps: Natural = 100
    lr_scheduler_type: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    decay_fraction: Ratio = 0.2
    min_lr_ratio: Ratio = 0.05
    weight_decay: NonNegative = 0.01
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.95
    max_grad_norm: NonNegative = 1.0
    bf16: bool = True
    max_tokens_per_batch: Count = 16384
    gradient_accumulation_steps: Count = 1
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 7
    step_decay: Ratio = 0.8
    loss: Literal["forward_kl", "cross_entropy"] = "forward_kl"
    logging_steps: Count = 10
    eval_steps: Count = 500
    save_steps: Count = 500
    save_total_limit: Count = 2
    seed: Natural = 0
    report_to: Names = []
    dataloader_num_workers: Natural = 0

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, steps: int) -> int:
        if steps == 0:
            raise ValueError("found 0, expected a positive number, or -1 to count epochs instead")
        return steps


class TreeConfig(Section):
    """A tree beside the chains: `topk` children a node and `nodes` in all, chosen by the draft's confidence (EAGLE-2),
    or fixed rank `paths` such as [[0], [1], [0, 0]].
    """

    topk: Count = 4
    nodes: Count = 16
    paths: Annotated[list[list[Natural]], Field(min_length=1)] | None = None


class EvaluationConfig(Section):
    """What is measured: numbers of drafted tokens `k`, temperatures and requests at a time, against plain decoding and
    two controls; `tree` and `policy` add configurations. `prompts`: a file, or a set such as builtin or mt-bench.
    """

    k: Counts = [1, 2, 3, 4, 5, 7]
    temperature: Temperatures = [0.0]
    top_p: Share = 1.0
    top_k: Natural = 0
    draft_mode: Literal["one_hot", "probabilistic"] = "one_hot"
    concurrency: Counts = [1]
    repeats: Count = 1
    tree: TreeConfig | None = None
    policy: Text | None = None
    max_new_tokens: Count = 128
    prompts: Text | None = None
    num_prompts: Count = 64
    ngram: bool = True
    untrained: bool = True
    seed: Natural = 0


class ExportConfig(Section):
    """The dtype of the exported weights and the engine that is to load them."""

    dtype: StorageDtype = "bfloat16"
    engine: Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp"] = "vllm"


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

    data, draft, evaluation, target = recipe.data, recipe.draft, recipe.evaluation, recipe.target
    splits = {split: [entry(item) for item in getattr(data, split)] for split in get_args(SplitName)}
    return recipe.model_copy(
        update={
            "target": target.model_copy(update={"name_or_path": name_or_path(target.name_or_path)}),
            "data": data.model_copy(update=splits),
            "draft": draft.model_copy(update={"init_from": name_or_path(draft.init_from)}),
            "evaluation": evaluation.model_copy(update={"prompts": name_or_path(evaluation.prompts)}),
        }
    )
