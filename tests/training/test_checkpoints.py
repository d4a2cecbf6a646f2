"""Checkpoints are whole or not taken for one: what is damaged is put aside, and the run goes on from the last whole
one.
"""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.training.callbacks import read_log
from drafttrain.training.checkpoints import LISTING, fault, list_files, settle
from drafttrain.training.run import train
from tests.training.test_signals import told
from tests.training.test_trainer import Stop, Watch, file_size_limit, interrupt, quiet
from tests.training.tiny_run import make_recipe, make_target, make_trainer, open_run


def listed(folder, **files: str):
    """A folder with these files and its listing."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    list_files(folder)
    return folder


def test_the_listing_has_size_and_hash_of_every_file(tmp_path) -> None:
    folder = listed(tmp_path / "checkpoint-3", a="one", b="")
    (folder / "part").mkdir()
    (folder / "part" / "c").write_bytes(b"\0\1")
    list_files(folder)
    assert json.loads((folder / LISTING).read_text())["files"] == {
        "a": {"bytes": 3, "sha256": hashlib.sha256(b"one").hexdigest()},
        "b": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        "part/c": {"bytes": 2, "sha256": hashlib.sha256(b"\0\1").hexdigest()},
    }
    assert fault(folder) is None


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda f: (f / "a").unlink(), "a is missing"),
        (lambda f: (f / "a").write_text("on"), "a has 2 bytes, expected 3"),
        (lambda f: (f / "a").write_text("onf"), "a is not what was written (sha256)"),
        (lambda f: (f / LISTING).write_text('{"files": {"a"'), "it cannot be read"),
        (lambda f: (f / LISTING).write_text("[]"), "it cannot be read"),
        (lambda f: (f / LISTING).write_bytes(b"\xff"), "it cannot be read"),
    ],
)
def test_damage_is_found_and_put_aside(tmp_path, damage, found) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 4):
        listed(tmp_path / f"checkpoint-{step}", a="one")
    damage(tmp_path / "checkpoint-4")
    said = []
    assert settle(run, said.append) == tmp_path / "checkpoint-2"
    (line,) = said
    assert line.startswith(f"checkpoint-4 is damaged: {found}")
    assert line.endswith("; kept as checkpoint-4.broken, training goes on from checkpoint-2")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4.broken"]
    assert settle(run, said.append) == tmp_path / "checkpoint-2" and len(said) == 1


def test_no_whole_one_is_said_too_and_one_without_a_listing_is_taken(tmp_path) -> None:
    run, said = RunFolder(tmp_path), []
    (listed(tmp_path / "checkpoint-4", a="one") / "a").unlink()
    assert settle(run, said.append) is None
    assert said[0].endswith("training goes on from the start")
    (tmp_path / "checkpoint-1").mkdir()
    assert settle(run, said.append) == tmp_path / "checkpoint-1"


def test_what_a_killed_process_left_is_cleared(tmp_path) -> None:
    run = RunFolder(tmp_path)
    listed(tmp_path / "checkpoint-4", a="one")
    for name in (".saving/checkpoint-6", ".checkpoint-2.old", ".draft.old", ".untrained.new"):
        listed(tmp_path / name, a=name)
    (tmp_path / ".log.jsonl.7.tmp").write_text("")
    assert settle(run, quiet) == tmp_path / "checkpoint-4"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-4", "draft"]
    assert (tmp_path / "draft" / "a").read_text() == ".draft.old"


def test_rotation_never_leaves_half_a_checkpoint_under_its_name(tmp_path, monkeypatch) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 4, 6):
        listed(tmp_path / f"checkpoint-{step}", a="one", b="two")

    def killed(path) -> None:
        (path / "a").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.rotate(1)
    assert [c.name for c in run.checkpoints()] == ["checkpoint-4", "checkpoint-6"]
    assert all(fault(checkpoint) is None for checkpoint in run.checkpoints())


def finished(folder, recipe, target):
    run = open_run(folder, recipe)
    train(recipe, run, target, quiet)
    return run


def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_if_it_were_not(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=8, save_steps=2, eval_steps=4, max_tokens_per_batch=64)
    target = make_target(recipe)
    straight = finished(tmp_path / "straight", recipe, target)
    run = finished(tmp_path / "run", recipe, target)
    assert [c.name for c in run.checkpoints()] == ["checkpoint-6", "checkpoint-8"]
    moments = run.path / "checkpoint-8" / "optimizer.pt"
    data = bytearray(moments.read_bytes())
    data[len(data) // 2] ^= 1  # One bit.
    moments.write_bytes(data)
    said = []
    train(recipe, run, target, said.append)
    assert any(line.startswith("checkpoint-8 is damaged: optimizer.pt is not what was written") for line in said)
    assert "resuming from checkpoint-6" in said
    assert (run.path / "checkpoint-8.broken").is_dir()
    for name in ("checkpoint-8", "draft/master"):
        one, other = (load_file(r.path / name / "model.safetensors") for r in (run, straight))
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert told(run) == told(straight)


def test_damaged_from_the_first_on_the_run_starts_again_with_a_new_log(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=4, save_steps=2, eval_steps=2, max_tokens_per_batch=64)
    target = make_target(recipe)
    run = finished(tmp_path / "run", recipe, target)
    log = told(run)
    for checkpoint in run.checkpoints():
        (checkpoint / "model.safetensors").write_bytes(b"")
    train(recipe, run, target, quiet)
    assert told(run) == log and len(log) == 6


def test_a_crash_before_the_first_checkpoint_leaves_no_rows_twice(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=4, save_steps=4, eval_steps=100)
    run = open_run(tmp_path / "run", recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    trainer.add_callback(Watch(interrupt(3)))
    with pytest.raises(Stop):
        trainer.fit()
    with open(run.log, "a") as file:
        file.write('{"step": 3, "lo')  # Cut off.
    again, _ = make_trainer(recipe, run, make_target(recipe))
    again.fit()
    assert [row["step"] for row in read_log(run.log) if "loss" in row] == [1, 2, 3, 4]


def test_the_only_checkpoint_outlives_a_full_disk(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=6, save_steps=2, eval_steps=100, save_total_limit=1)
    run = open_run(tmp_path / "run", recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    limit = file_size_limit(50_000)
    trainer.add_callback(Watch(lambda step: limit.__enter__() if step == 3 else None))
    try:
        with pytest.raises(RunError, match=r"checkpoint-4 could not be saved .*checkpoint-2 is intact"):
            trainer.fit()
    finally:
        limit.__exit__(None, None, None)
    assert [c.name for c in run.checkpoints()] == ["checkpoint-2"] and fault(run.checkpoints()[0]) is None
    assert not (run.path / ".saving").exists()
    again, _ = make_trainer(recipe, run, make_target(recipe))
    again.fit()
    assert [c.name for c in run.checkpoints()] == ["checkpoint-6"]
    assert set(json.loads((run.checkpoints()[0] / LISTING).read_text())["files"]) >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "position.json",
    }
