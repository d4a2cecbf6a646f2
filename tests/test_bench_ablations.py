"""scripts/bench_ablations.py: its recipes, the raw texts, the late mask and the table."""

import json

import pytest
import torch

from drafttrain.drafts import eagle3
from drafttrain.recipe import RegenerateConfig, parse_recipe, recipe_difference
from drafttrain.target import Target
from tests.load_script import load_script
from tests.tiny_models import make_model

bench = load_script("bench_ablations")


@pytest.fixture(scope="module")
def target():
    return Target.from_model(make_model("Llama"), name="x/y")


def test_each_variant_changes_what_its_name_says_and_nothing_else(target, tmp_path) -> None:
    base = bench.variant_recipe(target, tmp_path, 112, 7, {})
    assert (base.training.max_steps, base.training.max_minutes, base.training.ttt_steps) == (7, None, 3)
    for name, changes in bench.variants().items():
        recipe = bench.variant_recipe(target, tmp_path, 112, 7, changes)
        keys = {line.strip().split(":")[0].split(" ")[0] for line in recipe_difference(base, recipe)}
        expected = {f"{section}.{key}" for section, values in changes.items() for key in values}
        assert keys == expected, name
        parse_recipe(recipe.model_dump(mode="json"))


def test_the_raw_texts_are_those_of_the_files_behind_the_prompts(tmp_path) -> None:
    name, text = next(iter(bench.python_sources()))
    prompt = text[100:400]
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_text(json.dumps({"prompt": prompt, "file": name}) + "\n")
    changes = bench.raw_changes(tmp_path, tmp_path, RegenerateConfig(max_new_tokens=112, top_k=50))
    (row,) = map(json.loads, (tmp_path / "raw.jsonl").read_text().splitlines())
    start = text.index(prompt)
    assert row["prompt"] == prompt
    assert row["completion"] == text[start + 300 : start + 300 * 160 // 48]
    assert changes["data"]["regenerate"]["splits"] == ["validation"]
    assert changes["data"]["regenerate"]["top_k"] == 50


def test_the_late_mask_leaves_out_the_last_token_of_the_prompt_and_is_taken_back() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    own = eagle3.supervised_rows
    assert eagle3.supervised_rows(mask, 1)[0, 0].tolist() == [False, True, True, False, False]
    with bench.late_mask(True):
        assert eagle3.supervised_rows(mask, 1)[0, 0].tolist() == [False, False, True, False, False]
    assert eagle3.supervised_rows is own


def test_the_table_compares_with_the_first_row() -> None:
    def found(*accepted):
        return {"accepted": list(accepted), "iterations": [10] * len(accepted), "minutes": 3.25}

    results = {"base": found(10, 10, 10), "lk_hybrid": found(12, 12, 12), "raw text": found(5, 5, 5)}
    lines = bench.markdown(results).splitlines()
    assert lines[2] == "| base | 2.00 [2.00, 2.00] |  | 3.2 |"
    assert lines[3] == "| lk_hybrid | 2.20 [2.20, 2.20] | +0.20 [+0.20, +0.20] | 3.2 |"
    assert lines[4].startswith("| raw text | 1.50 [1.50, 1.50] | -0.50 ")
