"""A run of Medusa heads leaves a calibrated tree with its draft, once, and only where it is wanted."""

import json

import pytest

from drafttrain.data.run_folder import RunError
from drafttrain.drafts import load_draft
from drafttrain.evaluate import tree_calibration
from drafttrain.evaluate.run import evaluate_draft
from drafttrain.export.folder import export_draft
from drafttrain.recipe import RecipeError, parse_recipe
from drafttrain.training.run import train
from tests.training.tiny_run import make_target, open_run, settings

FILE = "medusa_tree.json"


def recipe_of(folder, validation=True, **draft):
    values = settings(folder)
    values |= {"method": "medusa", "draft": {"num_heads": 3, **draft}}
    del values["training"]["ttt_steps"]
    if not validation:
        del values["data"]["validation"]
    return parse_recipe(values, folder)


def test_the_tree_is_saved_with_the_draft_and_measured_beside_the_chains(tmp_path):
    recipe = recipe_of(tmp_path)
    run, target, said = open_run(tmp_path / "run", recipe), make_target(recipe), []
    train(recipe, run, target, said.append)
    facts = json.loads((run.draft / FILE).read_text())
    assert facts == json.loads((run.draft / "master" / FILE).read_text())
    assert {"paths", "nodes", "hits", "expected_acceptance_length", "expected_speedup", "v", "o", "draft"} <= set(facts)
    assert len(facts["paths"]) == facts["nodes"] <= 32
    (line,) = [one for one in said if one.startswith("tree: ")]
    assert f"{facts['nodes']} nodes" in line and said.index(line) == len(said) - 2

    draft = load_draft(run.path, target)
    assert draft.tree.paths() == facts["paths"]
    assert draft.tree_facts == {key: value for key, value in facts.items() if key != "paths"}
    export_draft(run.draft, target, tmp_path / "export")
    assert json.loads((tmp_path / "export" / FILE).read_text()) == facts
    settings = recipe.evaluation.model_copy(update={"ngram": False, "untrained": False, "k": [draft.tree.depth]})
    report = evaluate_draft(run.path, target, settings, recipe=recipe)
    trees = [run["tree"] for run in report["runs"] if run["tree"] is not None]
    assert trees == [{"kind": "static", "parents": list(draft.tree.parents)}]

    (run.draft / FILE).write_text(json.dumps({"paths": [[0]]}))  # The same command again leaves it alone.
    train(recipe, run, target, lambda message: None)
    assert json.loads((run.draft / FILE).read_text()) == {"paths": [[0]]}


@pytest.mark.parametrize("choices", [{"tree_nodes": 0}, {"validation": False}])
def test_no_tree_where_none_is_wanted_or_nothing_to_calibrate_on(tmp_path, choices):
    recipe = recipe_of(tmp_path, **choices)
    run, target = open_run(tmp_path / "run", recipe), make_target(recipe)
    train(recipe, run, target, lambda message: None)
    assert (run.draft / "model.safetensors").exists() and not list(run.path.rglob(FILE))
    assert load_draft(run.path, target).tree is None


def test_a_given_number_of_nodes_is_grown_without_timing(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, tree_nodes=3, sequential=True)
    run, target = open_run(tmp_path / "run", recipe), make_target(recipe)
    monkeypatch.delattr(tree_calibration, "measure_cost")
    train(recipe, run, target, lambda message: None)
    facts = json.loads((run.draft / FILE).read_text())
    assert len(facts["paths"]) <= 3 and "v" not in facts


def test_a_tree_that_cannot_be_written_is_told_and_the_draft_is_kept(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, tree_nodes=3)
    run, target = open_run(tmp_path / "run", recipe), make_target(recipe)

    def full(path, write):
        raise OSError("no space left")

    monkeypatch.setattr(tree_calibration, "write_beside", full)
    with pytest.raises(RunError, match=r"no space left.*Mend"):
        train(recipe, run, target, lambda message: None)
    assert load_draft(run.path, target).tree is None
    monkeypatch.undo()
    train(recipe, run, target, lambda message: None)
    assert load_draft(run.path, target).tree is not None


def test_tree_nodes_are_for_medusa_and_need_validation_data(tmp_path):
    values = settings(tmp_path)
    for method in ("eagle3", "kd"):
        bad = {**values, "method": method, "draft": {"tree_nodes": 8}}
        if method == "kd":
            bad["training"] = {k: v for k, v in bad["training"].items() if k != "ttt_steps"}
        with pytest.raises(RecipeError, match=r"draft\.tree_nodes"):
            parse_recipe(bad, tmp_path)
    with pytest.raises(RecipeError, match=r"draft\.tree_nodes: .*data\.validation"):
        recipe_of(tmp_path, validation=False, tree_nodes=8)
