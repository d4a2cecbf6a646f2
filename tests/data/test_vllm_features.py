"""Features from vLLM's files train as the target's own do; interrupted, killed and wrong engines lose and invent
nothing.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data import server_answers, store, vllm_files
from drafttrain.data.conversations import DataError
from drafttrain.data.http_client import EngineError
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.data.vllm_engines import engine_python
from drafttrain.recipe import RecipeError, VllmConfig, parse_recipe
from drafttrain.target import Target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from tests.data.vllm_files import FakeServer, asked_rows, read_seen, write_states, write_stub
from tests.training.tiny_run import make_target, make_trainer, open_run, settings, write_recipe

ASKED = [2, 4, 5, 8]
SHARD = 60


def quiet(message: str) -> None:
    pass


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path) -> None:
    """Shards of a few rows, short waits, folders of failed workers within reach."""
    monkeypatch.setattr(store, "SHARD_TOKENS", SHARD)
    monkeypatch.setattr(vllm_files, "SETTLED", 0.1)
    monkeypatch.setattr(server_answers, "PAUSE", 0.001)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def recipe_of(folder, source: str, vllm: dict | None = None, **features):
    values = settings(folder, max_steps=6, eval_steps=3, save_steps=100)
    # A row at a time: what the target computes for it then does not depend on its neighbours in the batch.
    values["features"] |= {"source": source, "batch_tokens": 1, **features}
    if source == "vllm":
        values["features"]["vllm"] = {"concurrency": 5, **(vllm or {})}
    return parse_recipe(values, folder)


class There(NamedTuple):
    """A target and its data in a folder, the rows of both splits, the store that the target itself fills, and the files
    of all rows in vLLM's format (folder/states).
    """

    folder: Path
    target: Target
    rows: list[list[int]]
    store: Path


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> There:
    folder = tmp_path_factory.mktemp("there")
    recipe = recipe_of(folder, "store")
    target = make_target(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SHARD_TOKENS", SHARD)
        prepared = prepare(recipe, open_run(folder / "store", recipe), target, quiet)
    rows = [row["input_ids"] for split in prepared.rows.values() for row in split]
    write_states(folder / "states", target, rows, ASKED)
    return There(folder, target, rows, prepared.folder / "features")


def engine_recipe(
    there: There, folder: Path, mode: str = "fine", delay: float = 0.02, vllm: dict | None = None, **features
):
    """A recipe whose vLLM is a stand-in in `folder`; it copies the files of folder/states, if there are any."""
    states = folder / "states" if (folder / "states").exists() else there.folder / "states"
    python = write_stub(folder, states, mode, delay)
    return recipe_of(there.folder, "vllm", {"python": str(python), **(vllm or {})}, **features)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*/*") if path.is_file()}


def spool_of(seen: dict) -> str:
    """Where an engine was told to write."""
    return seen["arguments"]["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]


def trajectory(run: RunFolder) -> list[float]:
    names = ("loss", "grad_norm", "eval_loss", "step_alpha/0")
    return [row[name] for row in read_log(run.log) for name in names if name in row]


# The same training.


def test_a_started_engine_fills_the_store_that_the_target_fills_and_training_is_the_same_bit_by_bit(
    there, tmp_path
) -> None:
    _, target, rows, stored = there
    runs, states = {}, {}
    for name in ("store", "vllm", "online"):
        recipe = engine_recipe(there, tmp_path) if name == "vllm" else recipe_of(there.folder, name)
        runs[name] = open_run(tmp_path / name, recipe)
        trainer, _ = make_trainer(recipe, runs[name], target)
        trainer.fit()
        states[name] = trainer.model.trained_state()
    found = runs["vllm"].prepared / "features"
    assert contents(found) == contents(stored)
    assert len(list((found / "train").glob("shard-*"))) > 3
    checks = {"vllm-check-train.json", "vllm-check-validation.json"}
    assert {path.name for path in found.iterdir()} == {"train", "validation"} | checks
    assert all(torch.equal(states["vllm"][name], states["store"][name]) for name in states["store"])
    found = trajectory(runs["vllm"])
    assert found == trajectory(runs["store"]) and len(found) > 3 * 6
    assert found == pytest.approx(trajectory(runs["online"]), rel=2e-5, abs=1e-6)
    asked = asked_rows(read_seen(tmp_path))
    assert sorted(set(asked)) == sorted({tuple(ids) for ids in rows})
    assert len(asked) == len(rows) + 2 * 4  # And four of each split to check the engine.


def test_bf16_files_train_as_the_targets_own_fp32_features_within_bf16(there, tmp_path) -> None:
    """Statistics, too, are then of hs[n] as it is in the files. Losses part by less than 1%."""
    _, target, rows, _ = there
    write_states(tmp_path / "states", target, rows, ASKED, dtype=torch.bfloat16)
    recipes = {"vllm": engine_recipe(there, tmp_path, dtype="bfloat16"), "online": recipe_of(there.folder, "online")}
    found = {}
    for name, recipe in recipes.items():
        run = open_run(tmp_path / name, recipe)
        train(recipe, run, target, quiet)
        found[name] = [row["loss"] for row in read_log(run.log) if "loss" in row]
    assert len(found["vllm"]) == 6 and found["vllm"] != found["online"]
    assert found["vllm"] == pytest.approx(found["online"], rel=1e-2)
    [shard, *_] = sorted((tmp_path / "vllm" / "prepared" / "features" / "train").glob("shard-*"))
    assert load_file(shard)["features"].dtype == torch.bfloat16


def test_a_server_fills_the_same_store(there, tmp_path) -> None:
    _, target, rows, stored = there
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "cmpl-another-0.safetensors").touch()
    faults = {2: (503, "loading"), 5: "lost"}
    with FakeServer(there.folder / "states", tmp_path / "shared", faults=faults) as server:
        recipe = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(tmp_path / "shared")})
        run = open_run(tmp_path / "run", recipe)
        prepare(recipe, run, target, quiet)
        assert len(server.bodies) == len(rows) + 2 * 4 + 2
    assert contents(run.prepared / "features") == contents(stored)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["cmpl-another-0.safetensors"]
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("target", 1, 0.0)
    assert body["prompt"] in rows and "stream" not in body
    checked = json.loads((run.prepared / "features" / "vllm-check-train.json").read_text())
    assert checked["engine"] == {"server": server.url, "model": "target"} and checked["samples"] == 4


def test_one_command_prepares_and_the_next_one_trains(there, tmp_path, cli) -> None:
    values = settings(there.folder, max_steps=2)
    values["features"] |= {"source": "vllm", "vllm": {"python": str(write_stub(tmp_path, there.folder / "states"))}}
    path = write_recipe(tmp_path, values)
    status, out, err = cli("prepare", path, "--output", tmp_path / "run")
    assert status == 0, err
    assert "vLLM: 4 samples compared with the target here, relative error: hs[2] " in out
    assert "GiB on the way, in files that vLLM writes" in out
    engines = len([line for line in read_seen(tmp_path) if "arguments" in line])
    status, _, err = cli("train", path, "--output", tmp_path / "run")
    assert status == 0, err
    assert len([line for line in read_seen(tmp_path) if "arguments" in line]) == engines == 2  # One for each split.


def test_what_an_engine_is_started_with(there, tmp_path) -> None:
    _, target, rows, _ = there
    vllm = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.5, "options": {"max_num_seqs": 7}}
    recipe = engine_recipe(there, tmp_path, vllm=vllm)
    prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    first = read_seen(tmp_path)[0]
    spool = spool_of(first)
    del first["arguments"]["kv_transfer_config"]
    assert Path(spool).parent == tmp_path / "run" / "prepared" / "features" and not Path(spool).exists()
    hf_config = {"eagle_aux_hidden_state_layer_ids": ASKED}
    assert first["arguments"] == {
        "model": str(there.folder / "target"),
        "dtype": "float32",
        "tensor_parallel_size": 4,
        "gpu_memory_utilization": 0.5,
        "max_model_len": max(map(len, rows[:24])) + 8,
        "enable_prefix_caching": False,
        "max_num_seqs": 7,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
    }
    assert first["multiprocessing"] == "1"  # In one process nobody would write the last group's files.
    groups = [line for line in read_seen(tmp_path) if "rows" in line]
    assert groups[0]["sampling"] == {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    assert max(len(line["rows"]) for line in groups) == 5


def test_medusa_heads_ask_for_the_last_layer_alone(there, tmp_path) -> None:
    write_states(tmp_path / "states", there.target, there.rows, [8])
    values = settings(there.folder, max_steps=2)
    del values["training"]["ttt_steps"]
    vllm = {"python": str(write_stub(tmp_path, tmp_path / "states"))}
    values |= {"method": "medusa", "features": values["features"] | {"source": "vllm", "vllm": vllm}}
    recipe = parse_recipe(values, there.folder)
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, there.target, quiet)
    [shard, *_] = sorted((run.prepared / "features" / "train").glob("shard-*"))
    own = load_file(there.store / "train" / shard.name)
    found = load_file(shard)
    assert set(found) == {"last_hidden", "target_lse", "target_argmax"}
    assert all(torch.allclose(found[name], own[name], rtol=1e-4, atol=1e-4) for name in found)
    last = {"eagle_aux_hidden_state_layer_ids": [8]}
    config = read_seen(tmp_path)[0]["arguments"]["speculative_config"]["draft_model_config"]
    assert config == {"hf_config": last}


# Interruptions.


def killed(work) -> None:
    """Run `work` in a process of its own, in which it is to end by SIGKILL."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("point", ["in a shard", "before a manifest", "while a file is read"])
def test_a_killed_command_goes_on_behind_its_last_whole_shard(there, tmp_path, monkeypatch, point) -> None:
    _, target, rows, stored = there
    recipe = engine_recipe(there, tmp_path)
    run = open_run(tmp_path / "run", recipe)
    count = 0

    def work() -> None:
        module, name, last = {
            "in a shard": (store, "finite_rows", 11),
            "before a manifest": (store, "write_json", 3),
            "while a file is read": (vllm_files, "_checked", 13),
        }[point]
        plain = getattr(module, name)

        def die(*args, **kwargs):
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, die)
        prepare(recipe, run, target, quiet)

    killed(work)
    first = read_seen(tmp_path)
    assert gone(first[0]["pid"])  # The engine ends with the command.
    there_now = json.loads((run.prepared / "features" / "train" / "manifest.json").read_text())["shards"]
    done = sum(shard["rows"] for shard in there_now)
    assert 0 < done < 24
    prepare(recipe, run, target, quiet)
    assert contents(run.prepared / "features") == contents(stored)
    second = asked_rows(read_seen(tmp_path)[len(first) :])
    assert not {tuple(ids) for ids in rows[:done]} & set(second)  # Nothing twice.
    left = Path(spool_of(first[0]))
    assert not left.exists()
    left.mkdir()  # Of a command that was killed behind its last shard.
    before = len(read_seen(tmp_path))
    prepare(recipe, run, target, quiet)
    assert len(read_seen(tmp_path)) == before and not left.exists()  # A whole store starts no engine.


def test_an_engine_that_dies_midway_is_told_and_the_same_command_goes_on(there, tmp_path) -> None:
    _, target, rows, stored = there
    recipe = engine_recipe(there, tmp_path, "dies")
    run = open_run(tmp_path / "run", recipe)
    with pytest.raises(EngineError, match=r"vLLM ended with status 9: it printed nothing\n\(job and whole log in "):
        prepare(recipe, run, target, quiet)
    manifest = run.prepared / "features" / "train" / "manifest.json"
    kept = sum(shard["rows"] for shard in json.loads(manifest.read_text())["shards"])
    assert 0 < kept < 24
    write_stub(tmp_path, there.folder / "states")
    before = len(read_seen(tmp_path))
    prepare(recipe, run, target, quiet)
    assert contents(run.prepared / "features") == contents(stored)
    asked = asked_rows(read_seen(tmp_path)[before:])
    assert not {tuple(ids) for ids in rows[:kept]} & set(asked)


def test_a_file_that_its_writer_cut_short_is_asked_for_again(there, tmp_path) -> None:
    _, target, rows, stored = there
    recipe = engine_recipe(there, tmp_path, "cut once")
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    assert contents(run.prepared / "features") == contents(stored)
    assert len(asked_rows(read_seen(tmp_path))) == len(rows) + 8 + 2  # An engine for each split cuts one.
    recipe = engine_recipe(there, tmp_path, "cut", delay=0.0)
    with pytest.raises(EngineError, match="no whole file of row .* in 3 tries.*the same command goes on"):
        prepare(recipe, open_run(tmp_path / "other", recipe), target, quiet)


def test_what_a_killed_client_left_on_a_server_goes_with_the_next_command(there, tmp_path, monkeypatch) -> None:
    _, target, _, stored = there
    shared = tmp_path / "shared"
    shared.mkdir()
    with FakeServer(there.folder / "states", shared) as server:
        recipe = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(shared)})
        run = open_run(tmp_path / "run", recipe)

        def work() -> None:
            monkeypatch.setattr(store, "write_json", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            prepare(recipe, run, target, quiet)

        for _ in range(2):
            killed(work)
        other = open_run(tmp_path / "other", recipe)
        time.sleep(0.3)
        left = {path.name for path in shared.iterdir()}
        prepare(recipe, other, target, quiet)
        assert left and {path.name for path in shared.iterdir()} == left  # Another run's are not touched.
        prepare(recipe, run, target, quiet)
    assert contents(run.prepared / "features") == contents(stored)
    assert list(shared.iterdir()) == []


def test_files_may_be_kept(there, tmp_path) -> None:
    _, target, rows, _ = there
    recipe = engine_recipe(
        there, tmp_path, vllm={"keep_files": True, "folder": str(tmp_path / "kept"), "check_samples": 0}
    )
    prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    assert len(list((tmp_path / "kept").rglob("*.safetensors"))) == len({tuple(ids) for ids in rows}) == len(rows)
    assert not list((tmp_path / "run" / "prepared" / "features").glob("vllm-check*"))


# Wrong engines.


def second(tensors: dict) -> dict:
    return tensors | {"hidden_states": tensors["hidden_states"][:, :3].contiguous()}


def other_tokens(tensors: dict) -> dict:
    return tensors | {"token_ids": tensors["token_ids"].flip(0)}


def unwritten(tensors: dict) -> dict:
    states = tensors["hidden_states"].clone()
    states[2] = 0
    return tensors | {"hidden_states": states}


def cached_prefix(tensors: dict) -> dict:
    return tensors | {"hidden_states": tensors["hidden_states"][3:].contiguous()}


def noisy(tensors: dict) -> dict:
    return tensors | {"hidden_states": tensors["hidden_states"] * 1.01}


def renamed(tensors: dict) -> dict:
    return {"hidden": tensors["hidden_states"], "token_ids": tensors["token_ids"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (second, r"holds hidden states \[\d+, 3, 32\]. Expected \[\d+, 4, 32\].*eagle_aux_hidden_state_layer_ids"),
        (cached_prefix, r"holds hidden states .*--no-enable-prefix-caching"),
        (other_tokens, r"is of other tokens \(.*than were asked for.*Mend"),
        (unwritten, r"has positions of zeros alone.*Mend: --no-enable-prefix-caching"),
        (noisy, r"vLLM's hs\[2\] is off by 0.01 of the target's own .*at most 0.001.*check_samples 0"),
        (renamed, r"holds hidden, token_ids. Expected token_ids and hidden_states"),
    ],
)
def test_files_that_are_not_what_was_asked_for_are_told(there, tmp_path, change, said) -> None:
    _, target, rows, _ = there
    write_states(tmp_path / "states", target, rows, ASKED, change)
    recipe = engine_recipe(there, tmp_path)
    with pytest.raises(EngineError, match=said):
        prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)


def test_layers_counted_otherwise_and_a_normed_last_one_are_named(there, tmp_path) -> None:
    _, target, rows, _ = there
    write_states(tmp_path / "states", target, rows, [1, 3, 4, 8])
    recipe = engine_recipe(there, tmp_path)
    with pytest.raises(
        EngineError, match=r"vLLM's hs\[2\] is this target's hs\[1\] \(relative error .*layers \[2, 4, 5, 8\]"
    ):
        prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)

    def normed(tensors: dict) -> dict:
        states = tensors["hidden_states"]
        states[:, -1] = target.head().normed(states[:, -1])
        return tensors | {"hidden_states": states}

    write_states(tmp_path / "states", target, rows, ASKED, normed)
    with pytest.raises(EngineError, match=r"vLLM's hs\[8\] is this target's hs\[8\] after the final norm"):
        prepare(recipe, open_run(tmp_path / "again", recipe), target, quiet)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("fails", r"vLLM ended with status 3: ValueError: no CUDA here\n\.\.\n  at 12\n(  at \d+\n){7}\(job"),
        ("absent", "cannot import vllm with .*Mend: make engine-venv"),
        ("unnamed", "names no file of hidden states"),
    ],
)
def test_an_engine_that_cannot_be_used_is_told(there, tmp_path, mode, said) -> None:
    recipe = engine_recipe(there, tmp_path, mode)
    with pytest.raises(EngineError, match=said):
        prepare(recipe, open_run(tmp_path / "run", recipe), there.target, quiet)


def test_a_server_that_extracts_nothing_is_told_how_to_start(there, tmp_path) -> None:
    with FakeServer(there.folder / "states", tmp_path, change=lambda answer: {"choices": answer["choices"]}) as server:
        recipe = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(tmp_path)})
        with pytest.raises(
            EngineError, match=r"Mend: start it with --no-enable-prefix-caching --speculative-config '.*\[2, 4, 5, 8\]"
        ):
            prepare(recipe, open_run(tmp_path / "run", recipe), there.target, quiet)


def test_samples_with_nan_are_left_out_by_name_as_of_any_store(there, tmp_path) -> None:
    _, target, rows, _ = there

    def broken(tensors: dict) -> dict:
        if tensors["token_ids"].tolist() == rows[3]:
            tensors["hidden_states"][1, 0, 0] = float("nan")
        return tensors

    write_states(tmp_path / "states", target, rows, ASKED, broken)
    recipe, said = engine_recipe(there, tmp_path, vllm={"check_samples": 30}), []
    prepared = prepare(recipe, open_run(tmp_path / "run", recipe), target, said.append)
    [line] = [line for line in said if "skipped" in line]
    assert line.endswith(f"skipped 1 of 24 samples, which are not finite: {there.folder}/train.jsonl:4")
    assert len(prepared.rows["train"]) == 23
    assert any(line.startswith("vLLM: 23 samples compared") for line in said)


def test_rows_too_long_and_folders_and_pythons_that_are_not_there(there, tmp_path, monkeypatch) -> None:
    _, target, rows, _ = there
    longest = max(map(len, rows[:24]))
    recipe = engine_recipe(there, tmp_path, vllm={"max_model_len": longest})
    run = open_run(tmp_path / "run", recipe)
    with pytest.raises(
        DataError, match=rf"train.jsonl:\d+ has {longest} tokens, and one is answered; vLLM takes {longest}"
    ):
        prepare(recipe, run, target, quiet)
    with FakeServer(there.folder / "states", tmp_path, max_model_len=longest) as server:
        recipe = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(tmp_path)})
        with pytest.raises(DataError, match=f"has {longest} tokens, and one is answered; http"):
            prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    with FakeServer(there.folder / "states", tmp_path) as server:
        recipe = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(tmp_path / "absent")})
        with pytest.raises(EngineError, match="absent is not there. Expected the folder that the server's connector"):
            prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    monkeypatch.setenv("DRAFTTRAIN_ENGINE_PYTHON", "/nowhere/python")
    with pytest.raises(EngineError, match="/nowhere/python is not there. .*make engine-venv"):
        engine_python(VllmConfig())
    assert engine_python(VllmConfig(python=str(tmp_path / "python"))) == tmp_path / "python"


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"source": "store", "vllm": {}}, "found vllm with source store, expected source vllm"),
        ({"source": "vllm", "vllm": {"server": "http://a:1"}}, "found server 'http://a:1' alone, expected the folder"),
        (
            {"source": "vllm", "vllm": {"server": "http://a:1", "folder": "x", "tensor_parallel_size": 2}},
            "found tensor_parallel_size 2, expected it without server",
        ),
        ({"source": "vllm", "vllm": {"model": "m"}}, "found model 'm', expected it beside server"),
        ({"source": "vllm", "max_gib": 3}, "expected max_gib with source hybrid alone"),
    ],
)
def test_settings_that_would_not_be_read_are_refused(tmp_path, features, said) -> None:
    values = settings(tmp_path)
    values["features"] |= features
    with pytest.raises(RecipeError, match=said):
        parse_recipe(values, tmp_path)


def test_paths_are_the_recipes_and_the_road_may_change_between_commands(there, tmp_path) -> None:
    _, target, _, stored = there
    write_stub(there.folder, there.folder / "states")
    recipe = recipe_of(there.folder, "vllm", {"python": "python", "folder": "spool"})
    assert recipe.features.vllm.python == str(there.folder / "python")
    run = open_run(tmp_path / "run", recipe)
    prepare(recipe, run, target, quiet)
    (run.prepared / "features" / "train" / "shard-00001.safetensors").unlink()
    with FakeServer(there.folder / "states", tmp_path) as server:
        other = recipe_of(there.folder, "vllm", {"server": server.url, "folder": str(tmp_path)})
        prepare(other, open_run(run.path, other), target, quiet)
    assert contents(run.prepared / "features") == contents(stored)
