"""Recipes: defaults, overrides, paths, round trips, and an error line for everything that can be wrong."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.errors import UserError
from drafttrain.recipe import (
    DataEntry,
    Recipe,
    RecipeError,
    load_recipe,
    override_recipe,
    parse_recipe,
    recipe_difference,
    recipe_to_yaml,
    save_recipe,
)

SMALLEST = {"method": "eagle3", "target": "google/gemma-3-270m", "data": {"train": [{"path": "train.jsonl"}]}}


def write(folder: Path, settings: dict | str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings), encoding="utf-8")
    return path


def lines_of(settings: dict) -> list[str]:
    """The problems of invalid settings laid over SMALLEST, one line each."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe({**SMALLEST, **settings})
    head, *lines = str(caught.value).splitlines()
    assert head == "recipe is not a valid recipe:"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def test_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST))
    assert recipe.method == "eagle3"
    assert recipe.target.name_or_path == "google/gemma-3-270m"
    assert (recipe.target.dtype, recipe.target.device, recipe.target.device_map) == ("auto", "auto", None)
    assert recipe.data.train == [DataEntry(path=str(tmp_path / "train.jsonl"))]
    assert (recipe.data.max_length, recipe.data.draft_vocab, recipe.data.regenerate) == (2048, 32000, None)
    assert (recipe.training.learning_rate, recipe.training.ttt_steps, recipe.training.step_decay) == (1e-4, 7, 0.8)
    assert recipe.evaluation.k == [1, 2, 3, 4, 5, 7]
    assert (recipe.export.dtype, recipe.export.engine) == ("bfloat16", "vllm")
    assert recipe.source_path == tmp_path / "recipe.yaml"


def test_an_empty_section_keeps_its_defaults_and_regenerate_its_own(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, f"{yaml.safe_dump(SMALLEST)}\ntraining:\n"), ["data.regenerate={}"])
    assert recipe.training == parse_recipe(SMALLEST).training
    assert recipe.data.regenerate.splits == ["train", "validation"]
    assert recipe.data.regenerate.temperature == [0.0]


def test_scientific_notation_is_a_number_in_files_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, f"{yaml.safe_dump(SMALLEST)}\ntraining: {{learning_rate: 3e-4}}\n")
    assert load_recipe(path).training.learning_rate == 3e-4
    assert load_recipe(path, ["training.learning_rate=1e-4"]).training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("training.bf16=false", lambda recipe: recipe.training.bf16 is False),
        ("evaluation.k=[2, 4]", lambda recipe: recipe.evaluation.k == [2, 4]),
        ("evaluation.k=3", lambda recipe: recipe.evaluation.k == [3]),
        ("evaluation.temperature=0.7", lambda recipe: recipe.evaluation.temperature == [0.7]),
        ("training.report_to=wandb", lambda recipe: recipe.training.report_to == ["wandb"]),
        ("data.regenerate.splits=[train]", lambda recipe: recipe.data.regenerate.splits == ["train"]),
        ("target.dtype=float32", lambda recipe: recipe.target.dtype == "float32"),
        ("target=some/other", lambda recipe: recipe.target.name_or_path == "some/other"),
        ("data.draft_vocab=null", lambda recipe: recipe.data.draft_vocab is None),
        ("data.train.0.path=x.jsonl", lambda recipe: recipe.data.train[0].path.endswith("/x.jsonl")),
        ("data.train.1.dataset=a/b", lambda recipe: recipe.data.train[1].dataset == "a/b"),
        ("data.test.0.dataset=a/b", lambda recipe: recipe.data.test[0].dataset == "a/b"),
        ("training.max_minutes=20", lambda recipe: recipe.training.max_minutes == 20.0),
    ],
)
def test_overrides(tmp_path: Path, override: str, read) -> None:
    path = write(tmp_path, SMALLEST)
    assert read(load_recipe(path, [override]))
    assert read(override_recipe(load_recipe(path), [override]))


def test_the_last_override_wins_and_the_file_is_untouched(tmp_path: Path) -> None:
    path = write(tmp_path, SMALLEST)
    before = path.read_bytes()
    assert load_recipe(path, ["training.seed=1", "training.seed=2"]).training.seed == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed", "expected key=value"),
        ("=3", "expected key=value"),
        ("training..seed=3", "expected key=value"),
        ("training.seed.more=3", "'more' lies below the value"),
        ("data.train.5.path=x", "found '5', expected an index from 0 to 1"),
        ("data.train.first.path=x", "found 'first', expected an index from 0 to 1"),
        ("evaluation.k=[1", "not readable as YAML"),
        (
            "training.learnin_rate=1",
            "training.learnin_rate: unknown key (value 1): did you mean training.learning_rate?",
        ),
        ("learning_rate=1", "did you mean training.learning_rate?"),
    ],
)
def test_impossible_overrides(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, {**SMALLEST, "training": {"seed": 1}})
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert message in str(caught.value)


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    (folder / "model").mkdir(parents=True)
    (tmp_path / "google").mkdir()
    monkeypatch.chdir(tmp_path)
    entries = {"train": [{"path": "../data/a.jsonl"}, {"path": "/data/b.jsonl"}], "test": [{"path": "c.jsonl"}]}
    write(folder, {**SMALLEST, "data": entries})

    recipe = load_recipe("recipes/recipe.yaml")
    assert [entry.path for entry in recipe.data.train] == [str(tmp_path / "data/a.jsonl"), "/data/b.jsonl"]
    assert recipe.data.test[0].path == str(folder / "c.jsonl")
    assert recipe.target.name_or_path == "google/gemma-3-270m"
    assert recipe.source_path == folder / "recipe.yaml"

    def target(name: str) -> str:
        return load_recipe("recipes/recipe.yaml", [f"target.name_or_path={name}"]).target.name_or_path

    assert target("model") == str(folder / "model")
    assert target("./missing") == str(folder / "missing")
    assert target("../other") == str(tmp_path / "other")
    assert target("~/model") == os.path.expanduser("~/model")
    assert target("google") == "google", "what merely exists in the working directory stays a hub id"
    local = load_recipe("recipes/recipe.yaml", ["draft.init_from=./small", "evaluation.prompts=../p.jsonl"])
    assert local.draft.init_from == str(folder / "small")
    assert local.evaluation.prompts == str(tmp_path / "p.jsonl")


def test_a_saved_recipe_loads_back_to_the_same_settings(tmp_path: Path) -> None:
    overrides = ["training.learning_rate=1e-5", "data.regenerate={temperature: [0.0, 0.7]}", "features.layers=[2, 9]"]
    recipe = load_recipe(write(tmp_path, SMALLEST), overrides)
    save_recipe(recipe, tmp_path / "run" / "recipe.yaml")
    again = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert recipe_difference(recipe, again) == []
    assert os.listdir(tmp_path / "run") == ["recipe.yaml"]
    assert again.source_path == tmp_path / "run" / "recipe.yaml"


def test_a_recipe_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="expected a place where the recipe can be written"):
        save_recipe(parse_recipe(SMALLEST), tmp_path / "file" / "recipe.yaml")


finite = st.floats(min_value=1e-300, max_value=1e300)


@settings(deadline=None)
@given(
    rate=finite,
    minutes=st.none() | finite,
    ratio=st.floats(0, 1),
    name=st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1),
    k=st.lists(st.integers(1, 10**9), min_size=1),
    splits=st.lists(st.sampled_from(["train", "validation", "test"])),
)
def test_yaml_round_trip(rate, minutes, ratio, name, k, splits) -> None:
    recipe = parse_recipe(
        {
            **SMALLEST,
            "data": {"train": [{"dataset": name, "weight": rate}], "regenerate": {"splits": splits}},
            "training": {"learning_rate": rate, "max_minutes": minutes, "step_decay": ratio},
            "evaluation": {"k": k},
        }
    )
    assert recipe_difference(recipe, parse_recipe(yaml.safe_load(recipe_to_yaml(recipe)))) == []


def test_text_with_a_line_break_is_refused() -> None:
    for name in ("a\nb", "a\x85", "\u2028"):
        with pytest.raises(RecipeError, match="without line breaks"):
            parse_recipe({**SMALLEST, "data": {"train": [{"dataset": name}]}})


def test_differences_name_the_key_and_both_values() -> None:
    first = parse_recipe(SMALLEST, "/a")
    assert recipe_difference(first, first) == []
    second = override_recipe(first, ["training.learning_rate=1e-3", "data.train.0.weight=2", "evaluation.k=[1]"])
    assert recipe_difference(first, second) == [
        "data.train.0.weight: 1.0 -> 2.0",
        "training.learning_rate: 0.0001 -> 0.001",
        "evaluation.k: [1, 2, 3, 4, 5, 7] -> [1]",
    ]
    longer = override_recipe(first, ["data.train.1.dataset=a/b"])
    assert [line.split(":")[0] for line in recipe_difference(first, longer)] == ["data.train"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("method", "eagle4", "found 'eagle4', expected 'eagle3', 'medusa' or 'kd'"),
        ("target", "", "found '', expected at least 1 character"),
        ("target.name_or_path", 7, "found 7, expected text (in quotes where it looks like a number)"),
        ("data.train", [], "found [], expected at least 1 item"),
        ("data.train", "a.jsonl", "found 'a.jsonl', expected a list of entries such as {path: conversations.jsonl}"),
        ("data.train", ["a.jsonl"], "found 'a.jsonl', expected an entry such as {path: conversations.jsonl}"),
        ("data.train", [{"split": "test"}], "found neither, expected exactly one of path and dataset"),
        ("data.train", [{"path": "a", "dataset": "b"}], "dataset 'b', expected exactly one of path and dataset"),
        ("training", [1], "found [1], expected a mapping of settings"),
        ("training.ttt_steps", 17, "found 17, expected a number less than or equal to 16"),
        ("training.ttt_steps", 0, "found 0, expected a number greater than or equal to 1"),
        ("training.step_decay", 1.5, "found 1.5, expected a number less than or equal to 1"),
        ("training.learning_rate", "fast", "found 'fast', expected a valid number"),
        ("training.learning_rate", 0, "found 0, expected a number greater than 0"),
        ("training.max_minutes", float("inf"), "found inf, expected a finite number"),
        ("training.max_steps", 0, "found 0, expected a positive number, or -1 to count epochs instead"),
        ("training.seed", True, "found True, expected a value that is not true or false"),
        ("training.bf16", "perhaps", "found 'perhaps', expected a valid boolean"),
        ("evaluation.k", [0], "expected a number greater than or equal to 1 (the plain baseline is always run)"),
        ("evaluation.k", [], "found [], expected at least 1 item (the plain baseline is always run)"),
        ("evaluation.top_p", 0, "found 0, expected a number greater than 0"),
        ("features.layers", [2, 2], "found [2, 2], expected distinct layers"),
        ("features.layers", [-1], "found -1, expected a number greater than or equal to 0"),
        (
            "export.engine",
            "tgi",
            "found 'tgi', expected 'vllm', 'sglang', 'tensorrt-llm', 'llama.cpp' or 'transformers'",
        ),
    ],
)
def test_every_invalid_setting_is_one_line(key: str, value: object, expected: str) -> None:
    section, _, name = key.partition(".")
    (line,) = lines_of({section: {name: value} if name else value})
    assert line.startswith(key)
    assert line.endswith(expected)


def test_missing_settings_and_settings_that_do_not_fit_together() -> None:
    assert lines_of({"method": None}) == ["method: not given, expected one of eagle3, medusa, kd"]
    assert lines_of({"target": {}}) == ["target.name_or_path: not given, expected a hub id, a folder or a .gguf file"]
    assert lines_of({"draft": {"num_attention_heads": 6, "num_key_value_heads": 4}}) == [
        "draft: found num_attention_heads 6, expected a multiple of num_key_value_heads 4"
    ]


@pytest.mark.parametrize(
    ("settings", "suggestion"),
    [
        ({"training": {"learnin_rate": 1}}, "did you mean training.learning_rate?"),
        ({"training": {"per_device_train_batch_size": 8}}, "use training.max_tokens_per_batch"),
        ({"training": {"max_length": 8}}, "did you mean data.max_length?"),
        ({"training": {"temprature": 8}}, "did you mean training.temperature?"),
        ({"learning_rate": 1}, "did you mean training.learning_rate?"),
        ({"dtype": "float32"}, "did you mean target.dtype or features.dtype or export.dtype?"),
        ({"trainig": {}}, "did you mean training?"),
        ({"target": {"name": "x", "name_or_path": "y"}}, "did you mean target.name_or_path?"),
        ({"data": {"train": [{"path": "a", "formt": "text"}]}}, "did you mean data.train.format?"),
        ({"export": {"quux": 1}}, "expected one of dtype, engine"),
    ],
)
def test_unknown_keys_are_told_where_they_belong(settings: dict, suggestion: str) -> None:
    (line,) = lines_of(settings)
    assert "unknown key" in line
    assert line.endswith(suggestion)


def test_all_problems_are_reported_at_once() -> None:
    lines = lines_of({"method": "x", "training": {"ttt_steps": 99, "sed": 1}, "seed": 1})
    assert [line.split(":")[0] for line in lines] == ["method", "training.ttt_steps", "training.sed", "seed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1: not readable as YAML"),
        ("method: eagle3\nmethod: kd\n", "line 2: not readable as YAML: key 'method' appears twice"),
        ("- eagle3", "found ['eagle3'], expected a mapping"),
        ("", "found None, expected a mapping"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.yaml: No such file or directory; expected a YAML recipe"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_a_recipe_is_frozen_and_its_error_a_user_error() -> None:
    assert issubclass(RecipeError, UserError)
    recipe = parse_recipe(SMALLEST)
    assert isinstance(recipe, Recipe)
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.seed = 3
