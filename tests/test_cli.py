"""The command line: every verb on a tiny run, one clear line for what a user gets wrong, and `accelerate launch`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drafttrain.data.run_folder import RunFolder
from drafttrain.evaluate import runner
from drafttrain.export.folder import save_draft
from drafttrain.target import load_target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from tests.tiny_medusa import make_heads
from tests.training.tiny_run import (
    make_recipe,
    prompt_rows,
    settings,
    write_recipe,
    write_rows,
    write_target,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished tiny run, `run`, with its recipe, data and target beside it."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, settings(folder, max_steps=4))
    subprocess.run(
        [sys.executable, "-m", "drafttrain", "train", str(recipe), "--output", str(folder / "run")],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return folder


def fails(result: tuple[int, str, str], *parts: str) -> None:
    """Status 1, nothing on stdout but progress, one `error: ...` on stderr that holds all parts, no traceback."""
    status, out, err = result
    assert status == 1, (status, err)
    assert "Traceback" not in out + err
    assert err.count("error:") == 1, err
    message = err[err.index("error:") :]
    for part in parts:
        assert part in message, message


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# The road.


def test_prepare_train_evaluate_export(cli, tmp_path) -> None:
    recipe = write_recipe(tmp_path, settings(tmp_path, max_steps=4))
    run = tmp_path / "run"
    status, out, _ = cli("prepare", recipe, "--output", run)
    assert status == 0 and f"Next: drafttrain train {run}" in out and left(run) == {"prepared", "recipe.yaml", "lock"}
    status, out, _ = cli("train", run)
    assert status == 0 and "start-up gate" in out and f"Next: drafttrain evaluate {run}" in out
    assert {"draft", "untrained", "checkpoint-4", "log.jsonl"} <= left(run)
    status, out, _ = cli("evaluate", run, "--k", "1,3", "--max-new-tokens", "6")
    assert status == 0 and "plain" in out and "eagle3 k=3" in out and "untrained eagle3 k=3" in out
    report = json.loads((run / "evaluation" / "test" / "report.json").read_text())
    assert {r["k"] for r in report["runs"]} == {0, 1, 3} and (run / "evaluation" / "test" / "report.html").exists()
    status, out, _ = cli("export", run, "--engine", "vllm")
    assert status == 0 and f"vllm serve {tmp_path / 'target'}" in out
    assert left(run / "export" / "vllm") == {"README.md", "config.json", "model.safetensors", "drafttrain.json"}


def test_json_is_one_object_on_stdout(cli, tmp_path) -> None:
    recipe = write_recipe(tmp_path, settings(tmp_path, max_steps=4))
    run = tmp_path / "run"
    calls = {
        "prepare": ("prepare", recipe, "--output", run),
        "train": ("train", recipe, "--output", run),
        "evaluate": ("evaluate", run, "--k", "2"),
        "export": ("export", run),
    }
    found = {}
    for name, call in calls.items():
        status, out, err = cli(*call, "--json")
        assert status == 0, err
        assert out.count("\n") == 1, out
        found[name] = json.loads(out)
    assert found["prepare"]["audit"]["train"]["conversations"] == 24
    assert found["train"]["validation"]["eval_acceptance_length"] >= 1 and found["train"]["draft"] == str(run / "draft")
    assert found["evaluate"]["schema"] == 1
    assert found["export"]["engine"] == "vllm" and Path(found["export"]["folder"]).is_dir()


def test_python_m_drafttrain_is_the_command(trained) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drafttrain", "export", str(trained / "run"), "--engine", "tgi"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr
        == "error: --engine is 'tgi', expected one of vllm, sglang, tensorrt-llm, llama.cpp for method eagle3\n"
    )
    assert not (trained / "run" / "export").exists()


# What a user gets wrong, before anything is written.


def broken(folder: Path, **changes) -> Path:
    """A recipe file with sections or keys replaced, e.g. target="x" or features={"layers": [1]}."""
    values = settings(folder, max_steps=4)
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
    return write_recipe(folder, values)


def refused(cli, tmp_path, recipe, *parts: str, verb: str = "train") -> None:
    run = tmp_path / "run"
    fails(cli(verb, recipe, "--output", run), *parts)
    assert left(run) <= {"recipe.yaml", "lock", "prepared"}
    assert not (run / "prepared" / "manifest.json").exists()


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_target_that_is_not_there(cli, tmp_path, verb) -> None:
    recipe = broken(tmp_path, target=str(tmp_path / "nowhere"))
    refused(cli, tmp_path, recipe, "nowhere", "no such folder", "Mend:", verb=verb)
    # The mended recipe takes the same folder: nothing was begun in it.
    assert cli("prepare", broken(tmp_path), "--output", tmp_path / "run")[0] == 0


def test_a_gguf_target_without_the_gguf_package(cli, tmp_path, monkeypatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    monkeypatch.setitem(sys.modules, "gguf", None)
    recipe = broken(tmp_path, target=str(tmp_path / "model.gguf"))
    refused(cli, tmp_path, recipe, "needs the gguf package", "pip install drafttrain[gguf]")


def test_a_shallow_target_without_feature_layers(cli, tmp_path) -> None:
    target = write_target(tmp_path / "shallow", num_hidden_layers=5)
    refused(cli, tmp_path, broken(tmp_path, target=str(target)), "5 layers", "features.layers")
    run = tmp_path / "run"
    recipe = broken(tmp_path, target=str(target), features={"layers": [1, 3, 4]})
    assert cli("train", recipe, "--output", run)[0] == 0


def test_a_hub_id_without_network_fails_in_seconds(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    recipe = broken(tmp_path, target="nobody/no-such-model")
    start = time.monotonic()
    refused(cli, tmp_path, recipe, "nobody/no-such-model", "127.0.0.1:9 cannot be reached", "Mend:")
    assert time.monotonic() - start < 10


def test_an_empty_data_file(cli, tmp_path) -> None:
    recipe = broken(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    refused(cli, tmp_path, recipe, "train.jsonl", "empty")


def test_a_broken_line_names_file_and_line(cli, tmp_path) -> None:
    recipe = broken(tmp_path)
    with open(tmp_path / "train.jsonl", "a") as file:
        file.write('{"text": "w1\n')
    refused(cli, tmp_path, recipe, f"{tmp_path / 'train.jsonl'}:25:")
    write_rows(tmp_path / "train.jsonl", [{"text": "w1 w2 w3 w4 w5"}] * 4)
    assert cli("prepare", recipe, "--output", tmp_path / "run")[0] == 0


def test_fully_masked_data(cli, tmp_path) -> None:
    recipe = broken(tmp_path)
    write_rows(tmp_path / "train.jsonl", [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 0]}] * 3)
    refused(cli, tmp_path, recipe, "every token is masked")


def test_an_unknown_recipe_key(cli, tmp_path) -> None:
    recipe = broken(tmp_path, training={"learning_rat": 1e-3})
    fails(cli("train", recipe, "--output", tmp_path / "run"), "training.learning_rat", "learning_rate")
    assert not (tmp_path / "run").exists()


def test_no_recipe_at_all(cli, tmp_path) -> None:
    fails(cli("train", tmp_path / "no.yaml", "--output", tmp_path / "run"), "no.yaml")
    (tmp_path / "empty").mkdir()
    fails(cli("train", tmp_path / "empty"), "is no run folder")
    assert left(tmp_path) == {"empty"}


# A run folder.


def test_the_folder_of_another_run_is_refused(cli, trained) -> None:
    before = {path: path.stat().st_mtime_ns for path in (trained / "run").rglob("*")}
    other = write_recipe(trained, settings(trained, max_steps=4, learning_rate=1e-5), "other.yaml")
    fails(cli("train", other, "--output", trained / "run"), "another recipe", "training.learning_rate: 0.003 -> 1e-05")
    fails(cli("train", trained / "recipe.yaml", "--output", trained / "run", "--fresh"), "is not empty", "--fresh")
    assert {path: path.stat().st_mtime_ns for path in (trained / "run").rglob("*")} == before


def test_a_folder_in_use_is_refused(cli, trained) -> None:
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom drafttrain.data.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(trained / "run")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            fails(cli("train", trained / "run"), "in use by another process")
        finally:
            process.kill()
    with RunFolder(trained / "run").lock():
        pass  # The dead process holds it no longer.


# Evaluation and export.


@pytest.mark.parametrize("k", ["0", "3,0", "-1"])
def test_k_of_zero(cli, trained, k) -> None:
    fails(cli("evaluate", trained / "run", f"--k={k}"), "evaluation.k", "plain baseline is always run")
    assert not (trained / "run" / "evaluation").exists()


def test_numbers_that_are_none(cli, trained) -> None:
    fails(cli("evaluate", trained / "run", "--k", "few"), "--k is 'few'")
    fails(cli("evaluate", trained / "run", "--temperature", "hot"), "--temperature is 'hot'")


def test_a_draft_for_another_tokenizer(cli, trained, tmp_path) -> None:
    other = write_target(tmp_path / "other", words=91)
    prompts = write_rows(tmp_path / "prompts.jsonl", prompt_rows(2, 0))
    output = tmp_path / "report"
    call = ("evaluate", trained / "run" / "draft", "--target", other, "--prompts", prompts, "--output", output)
    fails(cli(*call), "another tokenizer", "Mend:")
    assert not output.exists()


def test_a_draft_for_another_vocabulary_size(cli, trained, tmp_path) -> None:
    other = write_target(tmp_path / "other", vocab_size=107)
    prompts = write_rows(tmp_path / "prompts.jsonl", prompt_rows(2, 0))
    output = tmp_path / "report"
    call = ("evaluate", trained / "run" / "draft", "--target", other, "--prompts", prompts, "--output", output)
    fails(cli(*call), "vocabulary 107", "expects vocabulary 99")
    assert not output.exists()


def test_no_draft_and_no_target(cli, trained, tmp_path) -> None:
    fails(cli("evaluate", tmp_path / "nothing"), "its target is not known", "--target")
    fails(cli("export", tmp_path / "nothing"), "its target is not known", "--target")
    target = trained / "target"
    prompts = write_rows(tmp_path / "prompts.jsonl", prompt_rows(2, 0))
    fails(cli("evaluate", tmp_path / "nothing", "--target", target, "--prompts", prompts), "holds no draft")
    fails(cli("export", tmp_path / "nothing", "--target", target, "--output", tmp_path / "out"), "holds no draft")
    assert left(tmp_path) == {"prompts.jsonl"}


def test_the_built_in_prompts_leave_no_room_in_so_small_a_target(cli, trained, tmp_path) -> None:
    call = ("evaluate", trained / "run" / "draft", "--target", trained / "target", "--output", tmp_path / "report")
    fails(cli(*call), "no prompts", "--prompts")
    assert left(tmp_path) == set()


def test_an_unknown_engine_or_dtype(cli, trained) -> None:
    fails(cli("export", trained / "run", "--engine", "tgi"), "--engine is 'tgi'", "vllm, sglang")
    fails(cli("export", trained / "run", "--dtype", "int4"), "--dtype is 'int4'")
    assert not (trained / "run" / "export").exists()


def heads_of(target: Path, folder: Path, **choices) -> Path:
    """The draft folder of three Medusa heads."""
    loaded = load_target(str(target), dtype="float32")
    save_draft(make_heads(loaded, **choices), loaded, folder, torch.float32)
    return folder


def test_medusa_heads_are_exported_and_all_drafted_with(cli, trained, tmp_path) -> None:
    draft, out = heads_of(trained / "target", tmp_path / "draft"), tmp_path / "out"
    call = ("export", draft, "--target", trained / "target", "--output", out, "--json")
    for options, k in (((), 3), (("--k", "2"), 2)):
        status, text, err = cli(*call, *options)
        assert status == 0, err
        spec = f'{{"method": "medusa", "model": "{out}", "num_speculative_tokens": {k}}}'
        assert f"--speculative-config '{spec}'" in json.loads(text)["command"]
        assert json.loads((out / "config.json").read_text())["num_heads"] == k
    status, text, err = cli(*call[:-1])
    assert status == 0 and "all 3 heads draft; with fewer num_speculative_tokens" in text, err
    status, text, err = cli(*call, "--engine", "tensorrt-llm")
    assert status == 0 and json.loads(text)["command"] is None, err
    assert left(out) == {"README.md", "config.json", "medusa_lm_head.safetensors", "drafttrain.json"}
    fails(cli(*call, "--k", "4"), "--k is 4 and the draft has 3 heads", "Mend:")
    fails(cli(*call, "--engine", "sglang"), "expected one of vllm, tensorrt-llm for method medusa")


def test_sequential_heads_go_to_no_engine(cli, trained, tmp_path) -> None:
    draft, out = heads_of(trained / "target", tmp_path / "draft", sequential=True), tmp_path / "out"
    for options in (("export",), ("export", "--engine", "tensorrt-llm"), ("evaluate", "--engine", "vllm")):
        call = (*options, draft, "--target", trained / "target", "--output", out)
        fails(cli(*call), "sequential heads", "no engine serves", "Mend:")
    assert not out.exists()


def test_the_public_evaluation_refuses_k_of_zero_itself() -> None:
    with pytest.raises(runner.EvaluationError, match="expected numbers from 1 on"):
        runner.evaluate(None, {}, [[1, 2]], k=[0], ngram=False)


# accelerate launch.


SCRIPT = "scripts/train_eagle.py"


def start(module: str, *args, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", module, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=200)


def launch(*args, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return start("accelerate.commands.launch", *args, cwd=cwd)


@pytest.mark.parametrize(("where", "script"), [(".", SCRIPT), ("scripts", "train_eagle.py")])
def test_accelerate_launch_trains(tmp_path, where, script) -> None:
    recipe = write_recipe(tmp_path, settings(tmp_path))
    run = tmp_path / "run"
    done = launch(script, recipe, "training.max_steps=3", "--output", run, cwd=ROOT / where)
    assert done.returncode == 0, done.stderr
    assert f"Next: drafttrain evaluate {run}" in done.stdout
    assert {"checkpoint-3", "draft", "untrained"} <= left(run)


def test_the_script_refuses_a_recipe_of_another_method(tmp_path) -> None:
    done = launch("scripts/train_medusa.py", broken(tmp_path), "--output", tmp_path / "run")
    assert done.returncode == 1
    assert "error: " in done.stderr and "this script trains medusa" in done.stderr


def test_two_processes_train_as_one_with_twice_the_accumulation(tmp_path) -> None:
    options = {"max_steps": 5, "max_tokens_per_batch": 64}
    two = write_recipe(tmp_path, settings(tmp_path, **options), "two.yaml")
    done = start("torch.distributed.run", "--nproc_per_node", 2, SCRIPT, two, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    recipe = make_recipe(tmp_path, gradient_accumulation_steps=2, **options)
    run = RunFolder(tmp_path / "one")
    run.claim(recipe)
    train(recipe, run, say=lambda message: None)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("one", "two")]
    losses = [[row["loss"] for row in log if "loss" in row] for log in logs]
    lengths = [[row["eval_acceptance_length"] for row in log if "eval_loss" in row] for log in logs]
    assert len(losses[0]) == 5
    assert [row["epoch"] for row in logs[1]][-1] == 1.25  # 8 batches in 4 steps: both processes took their half
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert lengths[0] == pytest.approx(lengths[1], abs=1e-4)
    assert torch.isfinite(torch.tensor(losses)).all()
