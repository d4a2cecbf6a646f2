"""The variants of scripts/bench_methods.py are valid recipes on the same answers and budget; its table has all runs."""

import json

import pytest

from drafttrain.data.run_folder import RunError
from drafttrain.target import Target
from tests.load_script import load_script
from tests.tiny_models import make_model

bench = load_script("bench_methods")


@pytest.fixture
def recipes(tmp_path) -> dict:
    target = Target.from_model(make_model("Llama"), name="x/y")
    return {name: bench.method_recipe(target, tmp_path, 9.0, changes) for name, changes in bench.variants().items()}


def test_all_see_the_same_answers_for_the_same_minutes(recipes):
    assert {recipe.method for recipe in recipes.values()} == {"eagle3", "medusa", "kd"}
    assert len({recipe.data.model_dump_json(exclude={"draft_vocab"}) for recipe in recipes.values()}) == 1
    assert {recipe.training.max_minutes for recipe in recipes.values()} == {9.0}
    assert {recipe.training.max_steps for recipe in recipes.values()} == {-1}
    assert recipes["kd"].data.draft_vocab is None and recipes["medusa"].data.draft_vocab == 8192
    assert recipes["medusa-sequential"].draft.sequential
    assert [recipes[name].training.seed for name in ("medusa", "medusa-seed1", "medusa-seed2")] == [0, 1, 2]


def test_a_run_of_another_budget_is_refused(recipes, tmp_path):
    (tmp_path / "out" / "medusa").mkdir(parents=True)
    done = tmp_path / "out" / "medusa" / "done.json"
    done.write_text(json.dumps({"max_steps": -1, "max_minutes": 9.0}))
    bench.run_variant("medusa", recipes["medusa"], None, tmp_path / "out", None)  # Done: nothing is touched.
    done.write_text(json.dumps({"max_steps": -1, "max_minutes": 4.0}))
    with pytest.raises(RunError, match="4.0.*9.0"):
        bench.run_variant("medusa", recipes["medusa"], None, tmp_path / "out", None)


def test_the_table_has_a_row_for_each_run_but_the_baseline():
    values = {"mode": "greedy", "mean_acceptance_length": 2.0, "speedup": 1.5, "c": 0.1, "v": 1.1}
    spread = {"intervals": {"mean_acceptance_length": [1.9, 2.1], "speedup": [1.4, 1.6]}}
    report = {
        "runs": [
            {"draft": "none", "label": "plain"},
            {"draft": "ngram", "label": "ngram k=4", "k": 4, "tree": None, **values, **spread},
            {"draft": "medusa", "label": "medusa k=4", "k": 4, "tree": {"parents": [-1, -1, 0]}, **values, **spread},
        ]
    }
    found = bench.table(report, {})
    columns = {column.header: list(column.cells) for column in found.columns}
    assert columns["draft"] == ["ngram", "medusa"] and columns["tree"] == ["", "3"]
    assert columns["tau"] == ["2.000", "2.000"]
