"""The measuring verbs on a tiny run: evaluate with every option, tune, compare, generate, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.evaluate.run import settings_with, tree_of
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.recipe import EvaluationConfig, RecipeError
from tests.evaluate.fake_server import FakeEngine
from tests.training.tiny_run import prompt_rows, settings, write_recipe, write_rows

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("measured")
    recipe = write_recipe(folder, settings(folder, max_steps=4))
    command = [sys.executable, "-m", "drafttrain", "train", str(recipe), "--output", str(folder / "run")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return folder / "run"


def refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert status == 1 and "Traceback" not in out + err and err.count("error:") == 1, err
    assert not [part for part in parts if part not in err], err


def test_evaluate_with_everything(cli, run, tmp_path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    options = ["--k", "1,2", "--concurrency", "1,2", "--repeats", "2", "--temperature", "0,0.7", "--top-k", "9"]
    options += ["--tree", tree, "--policy", "confidence:0.01", "--typical", "--output", tmp_path / "out", "--json"]
    status, out, err = cli("evaluate", run, *options)
    assert status == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text()) and report["certificate"]["passed"]
    labels = {record["label"] for record in report["runs"]}
    assert labels == {
        *("plain", "n-gram k=1", "n-gram k=2", "untrained eagle3 k=2", "eagle3 k=1", "eagle3 k=2"),
        *("eagle3 static tree of 3 k=1", "eagle3 static tree of 3 k=2", "eagle3 confidence>=0.01 k=2"),
        *("eagle3 typical k=1", "eagle3 typical k=2"),
    }
    assert {record["concurrency"] for record in report["runs"]} == {1, 2} and report["break_even"]
    assert {record["sampling"]["top_k"] for record in report["runs"]} == {9}


def test_synthetic_rates_measure_the_system(cli, run, tmp_path) -> None:
    status, out, err = cli(
        "evaluate", run, "--k", "2", "--synthetic", "1,1", "--max-new-tokens", "16", "--output", tmp_path, "--json"
    )
    assert status == 0, err
    record = next(record for record in json.loads(out)["runs"] if record["synthetic"])
    # Every draft stands; only drafts behind a stop token leave the count.
    assert 2.5 < record["mean_acceptance_length"] <= 3 and record["lossy"] and record["identical_to_plain"] is None


def test_built_in_prompts_by_category(cli, run, tmp_path) -> None:
    options = ["--prompts", "builtin:chat,math", "--num-prompts", "4", "--k", "2", "--max-new-tokens", "4"]
    status, out, err = cli("evaluate", run, *options, "--output", tmp_path, "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["prompts"]["name"] == "builtin-chat-math"
    for record in report["runs"]:
        assert set(record["categories"]) <= {"chat", "math"} and record["categories"]


def test_tune_writes_a_report_and_engine_settings(cli, run) -> None:
    status, out, err = cli(
        "tune", run, "--k", "1,2", "--concurrency", "1,2", "--device", "H100", "--max-new-tokens", "6"
    )
    assert status == 0, err
    assert "median error of the prediction" in out and "Predicted on H100" in out
    folder = run / "evaluation" / "tune"
    report = json.loads((folder / "report.json").read_text())
    assert report["tune"]["calibration"]["prompts"] and set(report["tune"]["best"]) == {"1", "2"}
    drafted = [record for record in report["runs"] if record["draft"] != "none"]
    assert drafted and all("predicted" in record for record in drafted)
    settings_written = {path.relative_to(folder / "settings").parts[0] for path in folder.glob("settings/*/*")}
    assert settings_written <= {"n-gram", "eagle3"}
    for path in folder.glob("settings/eagle3/vllm-speculative.json"):
        assert json.loads(path.read_text())["model"] == str(run / "draft")
    assert "On other devices" in (folder / "report.html").read_text()
    assert (folder / "report.html").exists()
    status, out, err = cli("evaluate", run, "--k", "2", "--policy", "goodput", "--output", run / "good", "--json")
    assert status == 0, err
    assert "eagle3 goodput k=2" in {record["label"] for record in json.loads(out)["runs"]}


def test_compare_drafts_of_two_folders(cli, run, tmp_path) -> None:
    options = ["--k", "2", "--max-new-tokens", "6", "--prompts", run.parent / "test.jsonl", "--output", tmp_path]
    options += ["--target", run.parent / "target", "--json"]
    status, out, err = cli("compare", run / "draft", run / "untrained", *options)
    assert status == 0, err
    report = json.loads(out)
    assert {record["label"] for record in report["runs"]} == {"plain", "n-gram k=2", "draft k=2", "untrained k=2"}
    assert len(report["comparisons"]) == 3
    refused(cli("compare", run, run), "given twice")


def test_generate_colours_accepted_tokens(cli, run) -> None:
    status, out, err = cli("generate", run, "w1 w2 w3", "--max-new-tokens", "12", "--k", "3")
    assert status == 0, err
    assert "target " in out and "12 tokens in" in out and "acceptance length" in out
    status, out, err = cli("generate", run, "w1 w2", "--max-new-tokens", "5", "--tree", "2x4", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert len(found["tokens"]) <= 5 and found["acceptance_length"] >= 1


def test_evaluate_a_server(cli, run, tmp_path) -> None:
    with FakeEngine() as server:
        options = ["--engine", "vllm", "--url", server.url, "--max-new-tokens", "6", "--output", tmp_path, "--json"]
        status, out, err = cli("evaluate", run, *options)
    assert status == 0, err
    report = json.loads(out)
    assert report["engine"]["name"] == "vllm" and report["runs"][0]["mean_acceptance_length"] > 1


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--tree", "4by16"], ["--tree is '4by16'", "4x16"]),
        (["--tree", "0x4"], ["topk"]),
        (["--policy", "sometimes"], ["the policy is 'sometimes'"]),
        (["--policy", "confidence:2"], ["expected a probability"]),
        (["--concurrency", "0"], ["concurrency"]),
        (["--concurrency", "many"], ["--concurrency is 'many'"]),
        (["--synthetic", "0.5,0.6"], ["never"]),
        (["--synthetic", "0.5", "--typical"], ["exclude each other"]),
        (["--repeats", "0"], ["repeats"]),
        (["--prompts", "mtbench"], ["did you mean mt-bench"]),
        (["--prompts", "nowhere.jsonl"], ["no such file"]),
        (["--engine", "tgi"], ["--engine is 'tgi'"]),
        (["--engine", "sglang"], ["with --url"]),
        (["--engine", "vllm", "--url", "http://127.0.0.1:9", "--output", "nowhere"], ["127.0.0.1:9"]),
        (["--engine", "vllm", "--tree", "2x4"], ["--tree is not for a running engine"]),
        (["--engine", "vllm", "--typical"], ["--typical or --synthetic is not for"]),
        (["--engine", "vllm", "--temperature", "0,1"], ["expected one value"]),
        (["--engine", "vllm", "--engine-python", "nowhere/python"], ["make engine-venv"]),
        (["--url", "http://127.0.0.1:9", "--k", "2"], ["--k is not for a running engine"]),
        (["--baseline-url", "http://127.0.0.1:9"], ["expected --url too"]),
    ],
)
def test_what_evaluate_refuses(cli, run, options, parts) -> None:
    refused(cli("evaluate", run, *options), *parts)


@pytest.mark.parametrize("text", ["null", "5", '{"a": 1}', '[["a"]]', "[[1]]", "nonsense"])
def test_tree_files_that_hold_no_tree(cli, run, tmp_path, text) -> None:
    path = tmp_path / "tree.json"
    path.write_text(text)
    refused(cli("evaluate", run, "--tree", path))
    refused(cli("generate", run, "w1", "--tree", path))


def test_dynamic_trees_are_left_out_where_drafts_are_drawn(cli, run, tmp_path) -> None:
    options = ["--tree", "2x4", "--temperature", "0,0.8", "--draft-mode", "probabilistic", "--output", tmp_path]
    status, out, err = cli("evaluate", run, *options, "--json")
    assert status == 0, err
    assert "dynamic trees are left out" in err
    trees = [record for record in json.loads(out)["runs"] if record["tree"]]
    assert {record["mode"] for record in trees} == {"greedy"}


def test_goodput_without_costs(cli, run, tmp_path) -> None:
    options = ["--target", run.parent / "target", "--prompts", run.parent / "test.jsonl", "--output", tmp_path]
    options += ["--max-new-tokens", "8"]
    refused(cli("evaluate", run / "draft", "--policy", "goodput", *options), "drafttrain tune")


def test_an_output_that_cannot_be_written_is_told_first(cli, run, tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for verb in (["evaluate", run], ["tune", run], ["compare", run]):
        refused(cli(*verb, "--output", blocked / "x"), "cannot")


def test_a_device_without_numbers(cli, run) -> None:
    refused(cli("tune", run, "--k", "1", "--device", "TPU"), "device is 'TPU'", "H100")


def test_prompts_that_leave_no_room_are_named(cli, run, tmp_path) -> None:
    rows = write_rows(tmp_path / "long.jsonl", [*prompt_rows(2, seed=1), {"prompt": "w1 " * 140, "id": "endless"}])
    status, out, err = cli("evaluate", run, "--prompts", rows, "--k", "2", "--output", tmp_path / "out")
    assert status == 0, err
    assert "left out" in out and "endless (140 tokens)" in out


def test_settings_are_checked_where_they_are_given() -> None:
    with pytest.raises(RecipeError, match="evaluation.k.0: found 0, .*the plain baseline is always run"):
        settings_with(EvaluationConfig(), k=[0])
    changed = settings_with(EvaluationConfig(), tree={"topk": 2, "nodes": 5}, k=None)
    assert changed.k == EvaluationConfig().k and tree_of(changed.tree) == DynamicTree(2, 5)
    fixed = settings_with(EvaluationConfig(), tree={"paths": [[0], [0, 0]]})
    assert tree_of(fixed.tree) == StaticTree((-1, 0)) and tree_of(None) is None
