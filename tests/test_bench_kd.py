"""The table of scripts/bench_kd.py: signs of paired differences, what a variant changes, budgets that differ."""

import json

import pytest

from drafttrain.data.run_folder import RunError
from drafttrain.recipe import RecipeError
from drafttrain.target import Target
from tests.load_script import load_script
from tests.tiny_models import make_model

bench = load_script("bench_kd")


@pytest.fixture
def base(tmp_path) -> dict:
    return bench.base_settings(Target.from_model(make_model("Llama"), name="x/y"), tmp_path, 90)


def test_differences_are_those_of_the_row_less_forward_kl():
    report = {
        "runs": [
            {"id": "f", "label": "forward_kl k=4"},
            {"id": "a", "label": "jsd k=4"},
            {"id": "z", "label": "x k=4"},
        ],
        "comparisons": [
            {"a": "f", "b": "a", "tau_difference": {"value": 0.2, "interval": [0.1, 0.3]}},
            {"a": "z", "b": "f", "tau_difference": {"value": 0.5, "interval": [0.4, 0.6]}},
            {"a": "a", "b": "z", "tau_difference": {"value": 9.0, "interval": [8.0, 9.5]}},
        ],
    }
    f, a, z = report["runs"]
    assert bench._difference(report, a) == "-0.200 [-0.30, -0.10]"
    assert bench._difference(report, z) == "+0.500 [+0.40, +0.60]"
    assert bench._difference({**report, "comparisons": []}, f) == ""


def test_every_variant_is_a_valid_recipe_on_the_same_data(base):
    recipes = {name: bench.recipe_of(base, changes) for name, changes in bench.variants(6.0).items()}
    assert len({recipe.data.model_dump_json() for recipe in recipes.values()}) == 1
    for name in bench.LOSSES:
        assert recipes[name].training.loss == name
        assert (recipes[name].training.max_steps, recipes[name].draft.num_hidden_layers) == (90, 6)
    assert recipes["fresh"].draft.student == "fresh"
    assert recipes["on_policy"].training.max_minutes == recipes["off_policy"].training.max_minutes == 6.0
    assert recipes["off_policy"].training.on_policy is None
    with pytest.raises(RecipeError):
        bench.recipe_of(base, {"training": {"loss": "fkl"}})


def test_a_run_of_another_budget_is_refused_and_left_alone(base, tmp_path):
    recipe = bench.recipe_of(base, {})
    (tmp_path / "out" / "jsd").mkdir(parents=True)
    done = tmp_path / "out" / "jsd" / "done.json"
    done.write_text(json.dumps(bench.budget_of(recipe)))
    bench.run_variant("jsd", recipe, None, tmp_path / "out", None)  # Done: nothing is touched.
    other = bench.recipe_of({**base, "training": {**base["training"], "max_steps": 9}}, {})
    with pytest.raises(RunError, match="was trained with .*90.*9"):
        bench.run_variant("jsd", other, None, tmp_path / "out", None)
    assert not (tmp_path / "out" / "jsd" / "recipe.yaml").exists()
