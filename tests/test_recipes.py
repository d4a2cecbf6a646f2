"""Every recipe, on a tiny random model of its target's architecture: prepare, two training steps, evaluation, export.

Each distinct pair of architecture and method runs once; what else a recipe says is compared with its target's config.
"""

import json
import math
from pathlib import Path

import pytest

from drafttrain.data.run_folder import RunFolder
from drafttrain.errors import UserError
from drafttrain.evaluate.run import evaluate_draft
from drafttrain.export.folder import export_draft
from drafttrain.export.serve import serve_command
from drafttrain.init_families import THINKING
from drafttrain.recipe import Recipe, load_recipe, override_recipe
from drafttrain.target import load_target
from drafttrain.training.run import train
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.family_shapes import PUBLISHED, TINY_OF, tiny_model
from tests.tiny_models import save

ROOT = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = {
    str(path.relative_to(ROOT)): load_recipe(path)
    for path in sorted(ROOT.rglob("*.yaml"))
    if path.parent.name != "accelerate"
}
SIBLING_OF = {"gemma3": "gemma3_text", "qwen3_moe": "qwen3"}


def family(recipe: Recipe) -> str:
    return PUBLISHED[recipe.target.name_or_path]["model_type"]


PAIRS = {(family(recipe), recipe.method): name for name, recipe in RECIPES.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: target folder}, made when asked for, and three conversations."""
    root = tmp_path_factory.mktemp("targets")
    ends = {"role": "assistant", "content": "ok"}
    rows = [{"messages": [{"role": "user", "content": text}, ends]} for text in ("say hi", "a b c", "ab ab", "x y")]
    (root / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(kind: str, layers: int = 4) -> Path:
        folder = root / f"{kind}-{layers}"
        if not folder.exists():
            switch = next((f"{{% if {name} %}}{{% endif %}}" for key, (name, _) in THINKING.items() if key == kind), "")
            changes = {} if layers == 4 else {"num_hidden_layers": layers}
            if layers != 4 and "layer_types" in TINY_OF.get(kind, {}):
                changes["layer_types"] = TINY_OF[kind]["layer_types"][:layers]
            save(folder, tiny_model(kind, **changes), make_tokenizer(CHATML + switch))
        return folder

    return root / "talks.jsonl", make


def scaled(recipe: Recipe, target: Path, talks: Path, sibling: Path | None) -> Recipe:
    """The recipe itself with its sizes brought down to the tiny target's."""
    data = [{"path": str(talks)}]
    values = {
        "target.name_or_path": str(target),
        "target.dtype": "float32",
        "target.device_map": None,
        "data.train": data,
        "data.validation": data,
        "data.test": data,
        "data.max_length": 96,
        "data.regenerate.max_new_tokens": 6,
        "features.dtype": "float32",
        "training.bf16": False,
        "training.max_steps": 2,
        "training.logging_steps": 1,
        "training.max_tokens_per_batch": 256,
        "training.warmup_steps": 1,
        "training.eval_steps": 2,
        "training.save_steps": 2,
        "training.acceptance_prompts": 1,
        "training.acceptance_new_tokens": 4,
        "evaluation.k": [2],
        "evaluation.temperature": [0.0],
        "evaluation.num_prompts": 2,
        "evaluation.max_new_tokens": 4,
        "evaluation.ngram": False,
        "evaluation.untrained": False,
        "export.dtype": "float32",
    }
    if recipe.data.draft_vocab is not None:
        values["data.draft_vocab"] = 128
    if recipe.features.layers is not None:
        values["features.layers"] = [1, 2, 3]
    tiny = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    for name, value in {**tiny, "num_hidden_layers": 2, "tree_nodes": 4}.items():
        if getattr(recipe.draft, name) is not None:
            values[f"draft.{name}"] = value
    if recipe.method == "medusa":
        values["draft.tree_nodes"] = 4
    if recipe.draft.init_from is not None:
        values["draft.init_from"] = str(sibling)
    return override_recipe(recipe, [f"{key}={json.dumps(value)}" for key, value in values.items()])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_recipe_runs_from_conversations_to_an_export(pair, folders, tmp_path):
    kind, method = pair
    talks, make = folders
    recipe = RECIPES[PAIRS[pair]]
    sibling = make(SIBLING_OF.get(kind, kind), layers=2) if recipe.draft.init_from else None
    recipe = scaled(recipe, make(kind), talks, sibling)
    run, target, said = RunFolder(tmp_path / "run"), load_target(**recipe.target.model_dump()), []
    run.claim(recipe)
    train(recipe, run, target, say=said.append)
    steps = [json.loads(line) for line in run.log.read_text().splitlines()]
    losses = [row["loss"] for row in steps if "loss" in row]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert "trained 2 steps" in said[-1]
    report = evaluate_draft(run.path, target, recipe.evaluation, recipe=recipe, say=said.append)
    runs = {row["id"]: row for row in report["runs"]}
    assert any(row["draft"] == method and row["identical_to_plain"] for row in runs.values())
    exported = tmp_path / "export"
    k = export_draft(run.draft, target, exported, None, None if method == "medusa" else 2, recipe.export.engine)
    assert (exported / "config.json").exists() and (exported / "model.safetensors").exists()
    assert str(exported) in serve_command(recipe.export.engine, target, exported, k or 2, method)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_targets_config(name):
    recipe = RECIPES[name]
    config = PUBLISHED[recipe.target.name_or_path]
    text = config.get("text_config", config)
    n = text["num_hidden_layers"]
    assert name.split("/")[1].startswith(f"{recipe.method}-")
    assert recipe.data.max_length <= text["max_position_embeddings"]
    assert recipe.training.max_tokens_per_batch >= recipe.data.max_length
    assert recipe.data.draft_vocab is None or recipe.data.draft_vocab < text["vocab_size"]
    if recipe.method == "eagle3":
        assert recipe.features.layers in ([2, n // 2, n - 3], None)
    if recipe.draft.init_from is not None:
        small = PUBLISHED.get(recipe.draft.init_from, {"vocab_size": text["vocab_size"]})
        assert abs(small["vocab_size"] - text["vocab_size"]) < 1024
    if recipe.draft.num_hidden_layers is not None:
        assert 2 <= recipe.draft.num_hidden_layers < n


def test_the_families_of_the_readme_have_recipes():
    methods = {}
    for recipe in RECIPES.values():
        methods.setdefault(recipe.target.name_or_path, set()).add(recipe.method)
    assert set(methods) == set(PUBLISHED)
    assert all({"eagle3", "medusa"} <= found for found in methods.values())
    assert sum("kd" in found for found in methods.values()) >= 10


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("data.train.0.path", "no.jsonl", "eagle3"),
        ("data.validation.0.path", "no.jsonl", "eagle3"),
        ("draft.init_from", "./nowhere", "kd"),
        ("draft.init_from", "./nowhere", "eagle3"),
        ("features.layers", [1, 2, 9], "eagle3"),
        ("features.layers", [3, 2, 1], "eagle3"),
        ("draft.keep_layers", [0, 9], "kd"),
    ],
)
def test_what_only_the_target_or_the_disk_can_tell_names_its_key(key, value, name, folders, tmp_path):
    talks, make = folders
    base = next(recipe for recipe in RECIPES.values() if recipe.method == name and recipe.draft.init_from is None)
    recipe = scaled(base, make("llama"), talks, None)
    changes = [f"{key}={json.dumps(value)}", "data.regenerate=null", "data.chat_template_kwargs={}"]
    if name == "kd":
        changes += ["draft.num_hidden_layers=null", *(["draft.student=null"] if key == "draft.init_from" else [])]
    recipe = override_recipe(recipe, changes)
    target = load_target(**recipe.target.model_dump())
    with pytest.raises(UserError) as caught:
        train(recipe, RunFolder(tmp_path / "run"), target, say=lambda message: None)
    assert key in str(caught.value) and "\n" not in str(caught.value)
