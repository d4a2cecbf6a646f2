"""Faults of the machine and its users: a disk that is full at any writing step, folders that cannot be written, damaged
features, two runs in one folder. Each is named with its mend, and the run then ends as if nothing had been.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import run_training
from drafttrain.data.conversations import DataError
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunError
from drafttrain.errors import UserError
from drafttrain.recipe import parse_recipe
from drafttrain.training.run import train
from tests.load_script import SCRIPTS
from tests.training.forks import fork, ranks, wait
from tests.training.test_signals import told
from tests.training.test_trainer import file_size_limit, quiet
from tests.training.tiny_run import make_target, open_run, prompt_rows, settings, write_recipe, write_rows


def stored(folder, **training):
    """A recipe whose answers are written by the target and whose features are stored: every writing step there is."""
    for split, count in (("train", 16), ("validation", 4)):
        write_rows(folder / f"{split}.jsonl", prompt_rows(count, seed=count))
    values = settings(folder, max_steps=4, save_steps=2, eval_steps=2, **training)
    values["data"]["regenerate"] = {"max_new_tokens": 12}
    values["features"]["source"] = "store"
    return parse_recipe(values, folder)


def error_of(act) -> str | None:
    """What a user is told; None: all went well."""
    try:
        act()
    except UserError as error:
        return str(error)
    return None


def fails(act, run, made: Path) -> list[str]:
    """What a user is told where the disk is one byte too small for each file in `made` in turn."""
    sizes = {file.stat().st_size for file in made.rglob("*") if file.is_file()}
    told_so = []
    for limit in sorted({0, *(size - 1 for size in sizes if size)}):
        with file_size_limit(limit):
            message = error_of(act)
        if message:
            told_so.append(message)
            assert not [f for f in run.path.rglob(".*") if f.name.endswith((".new", ".old", ".saving"))], limit
    return told_so


def same_end(run, straight) -> None:
    """The same files, weights and log."""
    names = [{str(p.relative_to(r.path)) for p in r.path.rglob("*") if p.is_file()} for r in (run, straight)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            one, other = (load_file(r.path / name) for r in (run, straight))
            assert all(torch.equal(one[key], other[key]) for key in other), name
    assert told(run) == told(straight)


def test_a_full_disk_at_every_writing_step(tmp_path) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    straight, run = (open_run(tmp_path / name, recipe) for name in ("straight", "run"))
    train(recipe, straight, target, quiet)
    first = fails(lambda: prepare(recipe, run, target, quiet), run, straight.prepared)
    prepared = prepare(recipe, run, target, quiet)
    then = fails(lambda: train(recipe, run, target, quiet, prepared), run, straight.path)
    train(recipe, run, target, quiet)
    same_end(run, straight)
    for message in first:
        assert (
            f"{run.prepared} could not be written" in message and "Mend: free some space, then run the same" in message
        )
    for message in then:
        assert "could not be" in message and "Mend: free some space, then run the same command to resume" in message
    assert len(first) > 10 and len(then) > 10
    for part in ("untrained", "checkpoint-2 could not be saved"):
        assert any(part in message for message in then), then


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path) -> None:
    place = Path(tempfile.mkdtemp(prefix="read-only-"))
    try:
        recipe = stored(place)
        shutil.copytree(place, place / "inputs")
        run = open_run(place / "run", recipe)
        before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
        run.path.chmod(0o555)
        place.chmod(0o555)

        def claim() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # Modes do not bind root.
            open_run(run.path, recipe)

        def claim_new() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            open_run(place / "new", recipe)

        refused = f"error: {place}/new cannot be written (Permission denied). Mend: give another --output"
        kept = f"error: {run.recipe_file}: Permission denied; expected a place where the recipe can be written"
        for act, words in ((claim, kept), (claim_new, refused)):
            assert wait(fork(act, tmp_path / "said.txt")) == [1]
            assert words in (tmp_path / "said.txt").read_text()
        assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_damaged_shard_is_named_and_written_anew(tmp_path) -> None:
    recipe = stored(tmp_path)
    target = make_target(recipe)
    straight, run = (open_run(tmp_path / name, recipe) for name in ("straight", "run"))
    train(recipe, straight, target, quiet)
    prepared = prepare(recipe, run, target, quiet)
    (shard,) = (run.prepared / "features" / "train").glob("shard-*.safetensors")
    whole = shard.read_bytes()
    for left in (None, whole[:-64], b"\xff" * 8 + whole[8:]):  # Gone, cut, a broken header.
        shard.unlink()
        if left is not None:
            shard.write_bytes(left)
        with pytest.raises(DataError, match=r"shard-00000.safetensors is missing or damaged .* others are not touched"):
            train(recipe, run, target, quiet, prepared)
        assert not run.checkpoints()
        prepared = prepare(recipe, run, target, quiet)
        assert shard.read_bytes() == whole
    train(recipe, run, target, quiet)
    same_end(run, straight)


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(tmp_path) -> None:
    path = write_recipe(tmp_path, settings(tmp_path, max_steps=2))
    run = open_run(tmp_path / "run", parse_recipe(settings(tmp_path, max_steps=2), tmp_path))
    with run.lock():
        before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
        act = lambda: run_training(path, ["training.max_steps=5"], run.path, False, False)  # noqa: E731
        alone = fork(act, tmp_path / "alone.txt")
        assert wait(alone) == [1]
        both = wait(*ranks(act, tmp_path))
        assert both[0] == 1 and both[1] != 0
        for name in ("alone.txt", "rank-0.txt"):
            said = (tmp_path / name).read_text()
            assert "is in use by another process. Mend: wait for it, or give another --output" in said, said
        assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before
    with pytest.raises(RunError, match="in use"), run.lock():
        open_run(run.path, run.recipe())


def test_a_run_killed_while_writing_features_a_checkpoint_and_a_draft_ends_as_if_it_were_not(tmp_path) -> None:
    script = SCRIPTS / "check_kills.py"
    command = [sys.executable, script, "--at", "features,saving,draft", "--output", tmp_path / "kills"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills of eagle3, seed 0: every run resumed and ended bit-identical" in done.stdout
