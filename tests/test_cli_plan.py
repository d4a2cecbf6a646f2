"""The verb `plan`: what a recipe costs, sizes measured on a tiny target, devices without weights, a trained student
against its report, and what is refused.
"""

import json
import shlex
from pathlib import Path

import pytest

from drafttrain.cli_plan import _train_arguments, reset_keys
from drafttrain.evaluate.roofline import DEVICES, Roofline, shape_of
from drafttrain.plan_candidates import Size
from drafttrain.plan_print import advice
from drafttrain.recipe import DraftConfig, load_recipe, save_recipe
from tests.test_plan import GEMMA_270M
from tests.tiny_models import make_model, make_tokenizer, save
from tests.training.tiny_run import settings, write_recipe, write_target


def refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert status == 1 and "Traceback" not in out + err and err.count("error:") == 1, err
    assert not [part for part in parts if part not in err], err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a small model of its vocabulary, and a recipe."""
    folder = tmp_path_factory.mktemp("plan")
    write_target(folder / "target", max_position_embeddings=256)
    save(folder / "small", make_model("Llama", num_hidden_layers=2, max_position_embeddings=256), make_tokenizer(90))
    values = settings(folder)
    kd = {"draft_vocab": 60}
    recipe = {**values, "method": "kd", "data": values["data"] | kd, "features": {}, "draft": {"student": "pruned"}}
    recipe["training"] = {key: value for key, value in values["training"].items() if key != "ttt_steps"}
    write_recipe(folder, recipe)
    return folder


def test_plan_on_the_command_line(cli, folder):
    options = ["--sizes", "pruned:2,fresh:16x1", "--k", "1,2", "--context", "8"]
    status, out, err = cli("plan", folder / "target", *options, "--acceptance", ".7", "--json")
    assert status == 0, err
    (plan,) = json.loads(out)["plans"]
    assert {entry["label"] for entry in plan["sizes"]} == {"pruned:2", "fresh:16x1"} and plan["draft_vocab"] is None
    assert plan["sizes"][0]["acceptance"] == pytest.approx([0.7, 0.49]) and "CPU" in err
    status, out, err = cli(
        "plan", folder / "recipe.yaml", *options, "--acceptance", "1", "--acceptance", "pruned:2=.2,.1"
    )
    assert status == 0, err
    assert "pruned:2 joint rates 0.2 0.1" in out and "fresh:16x1 1 given the draft before" in out
    assert "draft vocabulary of 60 words" in out
    assert "Training kd for target" in out and "counted in the recipe's files" in out
    last = out.strip().splitlines()[-1]
    assert f"drafttrain train {folder / 'recipe.yaml'} draft.student=fresh" in last or "no size pays" in last


def test_a_recipe_s_cost_on_the_command_line(cli, folder, tmp_path):
    """An EAGLE-3 recipe: the cost alone, unless sizes are asked for; a kd recipe: both, unless they are not wanted."""
    recipe = write_recipe(tmp_path, settings(folder))
    status, out, err = cli("plan", recipe, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["plans"] == [] and found["cost"]["method"] == "eagle3" and not found["cost"]["data"]["assumed"]
    assert f"drafttrain prepare {recipe}" in err and found["cost"]["hours"][0]["device"] == "cpu"
    fewer = ("training.ttt_steps=1", "--tokens", "1000", "--device", "H100", "--processes", "2", "--utilisation", ".5")
    status, out, err = cli("plan", recipe, *fewer, "--output", tmp_path, "--json")
    assert status == 0, err
    less = json.loads(out)["cost"]
    assert less["draft"]["steps"] == 1 and less["data"]["tokens"] == 1000 and less["memory"]["processes"] == 2
    assert less["hours"][0]["utilisation"] == 0.5 and less["storage"]["folder"] == str(tmp_path)
    status, out, err = cli("plan", recipe, "--sizes", "pruned:2", "--device", "H100")
    assert status == 0 and "Training eagle3" in out and "sizes" not in err, err
    assert "Small drafts for target on H100" in out
    status, out, err = cli("plan", folder / "recipe.yaml", "--sizes", "none")
    assert status == 0 and "Training kd" in out and "Small drafts" not in out, err
    refused(cli("plan", folder / "target", "--tokens", "5"), "--tokens given for a target alone")
    refused(cli("plan", folder / "target", "training.ttt_steps=1"), "which is no recipe")
    refused(cli("plan", recipe, "training.ttt_step=1"), "ttt_step")
    refused(cli("plan", recipe, "--draft", folder / "small", "--processes", "2"), "--processes given for a trained")


def test_plan_for_devices_needs_no_weights(cli, folder, tmp_path):
    GEMMA_270M.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    status, out, err = cli("plan", tmp_path / "bare", "--device", "H100,L40S", "--layer-time", "0", "--json")
    assert status == 0, err
    first, second = json.loads(out)["plans"]
    assert (first["device"], second["device"]) == ("H100", "L40S") and len(first["sizes"]) == 17
    bandwidth = DEVICES["H100"].bandwidth / DEVICES["L40S"].bandwidth
    assert second["plain_step"] / first["plain_step"] == pytest.approx(bandwidth)
    assert first["plain_step"] == Roofline(DEVICES["H100"]).seconds(shape_of(GEMMA_270M), 1, 1, 1024)
    status, out, err = cli("plan", tmp_path / "bare", "--device", "H100", "--sizes", "fresh:160x2")
    assert status == 0 and "roofline" in out and "30 us a layer" in out and "fresh:160x2 is predicted best" in out


def test_a_hub_id_without_a_network_ends_within_seconds(cli, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(cli("plan", "nobody/nothing", "--device", "H100"), "nobody/nothing", "HF_HUB_OFFLINE is set", "Mend")


def test_a_student_on_the_command_line(cli, folder, tmp_path):
    target, small = folder / "target", folder / "small"
    options = ["--k", "1,2", "--max-new-tokens", "8", "--num-prompts", "2", "--prompts", folder / "test.jsonl"]
    status, _, err = cli("evaluate", small, "--target", target, *options, "--output", tmp_path)
    assert status == 0, err
    report = tmp_path / "report.json"
    status, out, err = cli("plan", target, "--draft", small, "--report", report, "--context", "8", "--json")
    assert status == 0, err
    found = json.loads(out)["student"]
    runs = {run["k"]: run for run in json.loads(report.read_text())["runs"] if run["draft"] == "kd"}
    assert [row["k"] for row in found["predictions"]] == [1, 2] and found["acceptance_assumed"] is False
    for row in found["predictions"]:
        assert row["measured"] == runs[row["k"]]["speedup"]
        assert row["tau"] == pytest.approx(runs[row["k"]]["mean_acceptance_length"])
    assert f"drafttrain evaluate {small} --target {target}" in err
    status, out, err = cli("plan", target, "--draft", small, "--acceptance", ".5", "--k", "2", "--context", "8")
    assert status == 0 and "1.75" in out and "ASSUMED" in out and "measured error" not in out, err


def test_mistakes(cli, folder, tmp_path):
    target = folder / "target"
    refused(cli("plan", target, "--sizes", "big"), "the size 'big' cannot be read", "fresh:WIDTHxLAYERS")
    refused(cli("plan", target, "--sizes", "pruned:12"), "pruned:12 has 12 layers; expected 2 to 7")
    refused(cli("plan", target, "--sizes", "fresh:12x1"), "12 wide; expected a multiple of 8")
    refused(cli("plan", target, "--sizes", "pruned:2", "--acceptance", "1.5"), "acceptance of pruned:2 is 1.5")
    refused(cli("plan", target, "--acceptance", "often"), "--acceptance is 'often'")
    refused(cli("plan", target, "--device", "H100,abacus"), "device is 'abacus'; expected one of A100")
    refused(cli("plan", target, "--k", "x"), "--k is 'x'")
    refused(cli("plan", tmp_path / "nothing", "--device", "H100"), "there is no such folder")
    refused(cli("plan", tmp_path / "none.yaml"), "none.yaml", "expected a YAML recipe")
    refused(cli("plan", tmp_path / "nothing"), "nothing")
    refused(cli("plan", target, "--report", tmp_path / "report.json"), "--draft FOLDER")
    refused(cli("plan", target, "--draft", folder / "small", "--report", tmp_path / "no.json"), "cannot be read")
    refused(
        cli("plan", target, "--draft", folder / "small", "--sizes", "pruned:2"), "--sizes given for a trained draft"
    )
    (tmp_path / "list.json").write_text("[]")
    refused(cli("plan", target, "--draft", folder / "small", "--report", tmp_path / "list.json"), "JSON list")


RECIPES = [
    path for path in sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml")) if path.parent.name != "accelerate"
]
UNCOMMON = {
    "pruned-by-list": ("kd", {"keep_layers": [0, 1, 7], "lora": {"r": 4}}, {}),
    "fresh": ("kd", {"student": "fresh", "hidden_size": 16, "head_dim": 8, "train_embeddings": True}, {}),
    "sibling": ("kd", {"student": "sibling", "init_from": "a/b"}, {}),
    "eagle3": (
        "eagle3",
        {"hidden_size": 16, "norm_before_residual": True, "init_from": "a/b"},
        {
            "training": {"ttt_steps": 3, "step_decay": 0.5},
            "features": {"layers": [1, 2, 3]},
            "evaluation": {"tree": {"topk": 2, "nodes": 4}},
        },
    ),
}


def next_recipe(source: Path, recipe, size: Size, draft_vocab: int | None = None):
    """What `drafttrain train` would read from the printed line, split as a shell splits it."""
    plan = {
        "best": str(size),
        "device": "x",
        "draft_vocab": draft_vocab,
        "sizes": [{"label": str(size), "draft": size.settings()}],
    }
    plan["sizes"][0] |= {"best": {"speedup": 1.5, "k": 3}, "break_even_acceptance": 0.3, "acceptance_to_tie": None}
    line = advice(plan, _train_arguments(str(source), recipe), reset_keys(recipe))
    path, *words = shlex.split(line.split("drafttrain train ")[1])
    if source.is_dir():
        assert words[:2] == ["--output", "NEW_FOLDER"]
        words = words[2:]
    return load_recipe(path, words)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [Size("pruned", 6), Size("fresh", 4, 128)], ids=str)
def test_the_next_command_is_a_valid_recipe(path, size, tmp_path):
    """Of the recipe itself, and of a run's folder, whose saved recipe gives every key."""
    recipe = load_recipe(path)
    folder = tmp_path / "a run"
    folder.mkdir()
    save_recipe(recipe, folder / "recipe.yaml")
    for source in (path, folder):
        trained = next_recipe(source, recipe, size)
        assert trained.method == "kd" and trained.draft == DraftConfig(**size.settings())
        assert trained.data.draft_vocab is None and trained.target == recipe.target
        assert next_recipe(source, recipe, size, 4096).data.draft_vocab == 4096


@pytest.mark.parametrize("name", UNCOMMON)
@pytest.mark.parametrize("size", [Size("pruned", 6), Size("fresh", 4, 128)], ids=str)
def test_the_next_command_undoes_what_the_size_refuses(name, size, tmp_path):
    method, draft, others = UNCOMMON[name]
    data = {"train": [{"path": "train.jsonl"}]}
    write_recipe(tmp_path, {"method": method, "target": "x/y", "data": data, "draft": draft, **others})
    recipe = load_recipe(tmp_path / "recipe.yaml")
    for source in (tmp_path / "recipe.yaml", tmp_path):
        trained = next_recipe(source, recipe, size)
        assert trained.draft == DraftConfig(**size.settings())
        assert (trained.features.layers, trained.evaluation.tree, trained.training.ttt_steps) == (None, None, 7)


def test_a_folder_that_is_no_run_is_evaluated_with_its_target(cli, folder, tmp_path):
    out = cli("plan", folder / "recipe.yaml", "--draft", folder / "small", "--k", "1", "--acceptance", ".5")
    assert out[0] == 0, out[2]
    assert f"drafttrain evaluate {folder / 'small'} --target {folder / 'target'}" in out[1]


def test_rates_of_a_trained_draft_have_no_names_and_suffice(cli, folder):
    common = ("plan", folder / "recipe.yaml", "--draft", folder / "small")
    refused(cli(*common, "--acceptance", "pruned:4=.5"), "pruned:4", "rates alone")
    refused(cli(*common, "--k", "9", "--acceptance", ".5,.2"), "--k is 9", "2 rates", "expected a rate for each")
    refused(cli(*common, "--k", "0"), "--k is 0; expected numbers from 1 on")
    status, out, err = cli(*common, "--acceptance", ".5,.2", "--context", "8", "--json")
    assert status == 0, err
    found = json.loads(out)["student"]["predictions"]
    assert [(row["k"], row["tau"]) for row in found] == [(1, 1.5), (2, pytest.approx(1.7))]
