"""scripts/bench_quality.py: the recipes of its runs, the choice of K, table and verdicts, and what is kept."""

import json

import pytest

from drafttrain.data.run_folder import RunError
from drafttrain.target import Target
from tests.load_script import load_script
from tests.tiny_models import make_model

bench = load_script("bench_quality")


def test_a_run_is_the_demos_recipe_but_for_answers_and_minutes(tmp_path) -> None:
    target = Target.from_model(make_model("Llama"), name="x/y")
    demo = bench.demo_recipe(target, tmp_path, 20.0)
    recipe = bench.quality_recipe(target, tmp_path, 20.0, 112, [])
    assert recipe.data.regenerate.max_new_tokens == 112
    again = recipe.model_dump()
    again["data"]["regenerate"]["max_new_tokens"] = demo.data.regenerate.max_new_tokens
    assert again == demo.model_dump()
    changed = bench.quality_recipe(target, tmp_path, 60.0, 112, ["training.loss=lk_hybrid"])
    assert (changed.training.loss, changed.training.max_minutes) == ("lk_hybrid", 60.0)


def run(label: str, k: int, speedup: float, draft: str = "eagle3") -> dict:
    return {
        "label": f"{label} k={k}" if draft != "none" else "plain",
        "draft": draft,
        "k": k,
        "speedup": speedup,
        "mean_acceptance_length": 2.5,
        "intervals": {"speedup": [speedup - 0.1, speedup + 0.1], "mean_acceptance_length": [2.4, 2.6]},
        "tokens_per_second": {"pooled": 40.0, "min": 30.0, "max": 50.0},
        "c": None if draft == "none" else 0.05,
        "v": None if draft == "none" else 1.1,
    }


PLAIN = run("plain", 0, 1.0, "none")
REPORTS = {
    "greedy": {"runs": [PLAIN, run("n-gram", 5, 1.9, "ngram"), run("20-minutes", 4, 2.0), run("60-minutes", 5, 2.39)]},
    "sampled": {"runs": [PLAIN, run("n-gram", 3, 1.2, "ngram"), run("20-minutes", 3, 1.29), run("60-minutes", 3, 1.5)]},
}


def test_each_draft_gets_the_depth_that_was_fastest() -> None:
    report = {"runs": [PLAIN, run("a", 3, 1.5), run("a", 5, 1.7), run("b", 3, 1.9), run("b", 5, 1.8), run("a", 4, 1.6)]}
    assert bench.best_depths(report) == {"a": (5,), "b": (3,)}


def test_verdicts_are_the_goals_of_each_run_and_mode() -> None:
    lines = list(bench.verdicts(REPORTS, [20.0, 60.0, 0.5]))
    assert [passed for passed, _ in lines] == [True, False, False, True]
    assert "20 minutes, greedy, K = 4: 2.00 times plain decoding 1.90-2.10, goal 2" in lines[0][1]
    disturbed = {"greedy": {"runs": [PLAIN, run("20-minutes", 4, 2.6)]}}  # tau is 2.5.
    ((passed, words),) = bench.verdicts(disturbed, [20.0])
    assert not passed and "more than tau" in words


def test_the_table_has_a_row_for_each_run() -> None:
    cells = {column.header: list(column.cells) for column in bench.table(REPORTS).columns}
    assert cells["draft"] == ["plain", "n-gram", "20-minutes", "60-minutes"] * 2
    assert cells["mode"] == ["greedy"] * 4 + ["sampled"] * 4
    assert cells["speedup"][:4] == ["1", "1.90", "2.00", "2.39"]
    assert cells["tokens/s (range)"][0] == "40.0 (30.0-50.0)" and cells["v"][:2] == ["", "1.100"]


def test_a_report_is_kept_until_something_else_is_asked(tmp_path) -> None:
    path, made = tmp_path / "test-greedy.json", []

    def make() -> dict:
        made.append(1)
        return {"interrupted": len(made) == 1, "number": len(made)}

    with pytest.raises(RunError, match="was interrupted"):
        bench.measured(path, {"new": 8}, make)
    assert not path.exists()
    assert bench.measured(path, {"new": 8}, make)["number"] == 2
    assert bench.measured(path, {"new": 8}, make)["number"] == 2
    assert bench.measured(path, {"new": 9}, make)["number"] == 3
    assert json.loads(path.read_text())["asked"] == {"new": 9}


def test_minutes_are_positive_numbers() -> None:
    assert bench.minutes_of("20,60") == [20.0, 60.0]
    for wrong in ("", "0", "5,-1", "twenty"):
        with pytest.raises(RunError, match="--minutes"):
            bench.minutes_of(wrong)
