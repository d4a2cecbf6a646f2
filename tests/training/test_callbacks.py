"""The budget in minutes and the log."""

import json
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from drafttrain.data.run_folder import RunError
from drafttrain.training.callbacks import Budget, JsonLog, cut_log, read_log

ONE = SimpleNamespace(world_size=1)


def at(budget: Budget, minutes: float) -> Budget:
    """The budget as it is after an optimizer step that ended `minutes` into the run."""
    budget.start(60 * minutes)
    budget.on_optimizer_step(ONE, None, None)
    return budget


def test_progress_is_the_larger_share_of_steps_and_minutes() -> None:
    assert Budget().progress(3, 12) == 0.25
    assert Budget().progress(30, 12) == 1.0 and Budget().progress(0, 0) == 0.0
    assert at(Budget(10), 5).progress(3, 12) == pytest.approx(0.5, abs=1e-3)
    assert at(Budget(10), 1).progress(3, 12) == 0.25
    assert at(Budget(10), 50).progress(3, 12) == 1.0


def test_progress_stands_still_between_steps() -> None:
    budget = at(Budget(10), 5)
    first = budget.progress(0, 10)
    assert budget.progress(0, 10) == first
    assert budget.seconds() > 300


def test_the_minutes_stop_the_run() -> None:
    control = TrainerControl()
    assert not at(Budget(10), 9.9).on_step_end(ONE, None, control).should_training_stop
    assert not at(Budget(None), 1e6).on_step_end(ONE, None, control).should_training_stop
    assert at(Budget(10), 10).on_step_end(ONE, None, control).should_training_stop
    assert Budget(10).spent() is False and at(Budget(10), 10).spent()


def test_the_state_carries_the_seconds() -> None:
    budget = Budget(10)
    assert budget.state()["args"]["elapsed"] == 0.0
    budget.start(100.0)
    assert 100.0 < budget.state()["args"]["elapsed"] < 101.0
    copy = Budget(**budget.state()["args"])
    assert copy.max_minutes == 10 and copy.seconds() > 100.0


def log(path, step: int, **values) -> None:
    state = TrainerState(is_world_process_zero=values.pop("main", True))
    state.global_step = step
    JsonLog(path, Budget()).on_log(None, state, None, logs=values)


def test_log_lines(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, 1, loss=2.5)
    log(path, 2, loss=2.0, main=False)
    log(path, 2, eval_loss=1.0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "minutes": 0.0, "loss": 2.5},
        {"step": 2, "minutes": 0.0, "eval_loss": 1.0},
    ]
    assert read_log(path)[0]["loss"] == 2.5
    assert read_log(tmp_path / "nothing") == []


def test_a_log_that_cannot_be_written(tmp_path) -> None:
    with pytest.raises(RunError, match="could not be written .* last checkpoint are intact"):
        log(tmp_path, 1, loss=1.0)  # a folder


def test_a_resume_cuts_the_log_behind_its_checkpoint(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    for step in (1, 2, 3, 4):
        log(path, step, loss=float(step))
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # cut off by a crash
    assert [row["step"] for row in read_log(path)] == [1, 2, 3, 4]
    cut_log(path, 2)
    log(path, 3, loss=30.0)
    assert [row["loss"] for row in read_log(path)] == [1.0, 2.0, 30.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
