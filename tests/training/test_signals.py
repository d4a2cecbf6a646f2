"""SIGTERM, SIGINT and SIGUSR1: the step ends, a checkpoint is saved, the exit status says which it was, and the run
goes on as if nothing had been.
"""

import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from drafttrain import demo
from drafttrain.cli import run_training
from drafttrain.recipe import load_recipe
from drafttrain.training import signals
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from drafttrain.training.signals import Interrupted, Stop
from drafttrain.training.trainer import DraftTrainer
from tests.training.forks import ranks, wait
from tests.training.test_trainer import TIMED, Wrapped, quiet
from tests.training.tiny_run import make_recipe, make_target, make_trainer, open_run, settings, write_recipe


def told(run) -> list[dict]:
    """The log without what the clock says, and without each session's last line."""
    rows = [row for row in read_log(run.log) if "train_loss" not in row]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


class At(TrainerCallback):
    """Calls `act` while the trainer runs step `step` (1, 2, ..)."""

    def __init__(self, step: int, act):
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.act()


def same_weights(a, b, name: str) -> None:
    one, other = (load_file(run.path / name / "model.safetensors") for run in (a, b))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture
def act_at(monkeypatch):
    """Lets `train` call something within a step."""

    def plan(step: int, act) -> None:
        begin = DraftTrainer.__init__

        def start(self, *args, **kwargs):
            begin(self, *args, **kwargs)
            self.add_callback(At(step, act))

        monkeypatch.setattr(DraftTrainer, "__init__", start)

    yield plan
    monkeypatch.undo()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_ends_the_step_and_saves_it(tmp_path, act_at, number, status) -> None:
    recipe = make_recipe(tmp_path, max_steps=6, save_steps=4, eval_steps=2, max_tokens_per_batch=64)
    run = open_run(tmp_path / "run", recipe)
    handlers = [signal.getsignal(n) for n in signals.SIGNALS]
    act_at(2, lambda: send(number))  # Step 2 is to be validated, and no checkpoint is due.
    with pytest.raises(Interrupted) as caught:
        train(recipe, run, make_target(recipe), quiet)
    assert caught.value.status == status and caught.value.word == "stopped"
    name = signal.Signals(number).name
    assert str(caught.value).startswith(f"{name} came; checkpoint-2 is saved. To go on, run the same command again")
    assert str(caught.value).endswith(f"drafttrain train {run.path}")
    assert [signal.getsignal(n) for n in signals.SIGNALS] == handlers
    assert [c.name for c in run.checkpoints()] == ["checkpoint-2"]
    assert not any("eval_loss" in row for row in told(run))


def test_a_run_that_was_stopped_ends_as_if_it_were_not(tmp_path, act_at, monkeypatch) -> None:
    recipe = make_recipe(tmp_path, max_steps=6, save_steps=4, eval_steps=2, max_tokens_per_batch=64)
    target = make_target(recipe)
    straight, run = open_run(tmp_path / "straight", recipe), open_run(tmp_path / "run", recipe)
    train(recipe, straight, target, quiet)
    act_at(2, send)
    with pytest.raises(Interrupted):
        train(recipe, run, target, quiet)
    monkeypatch.undo()
    train(recipe, run, target, quiet)
    assert told(run) == told(straight)
    assert [row["step"] for row in told(run) if "eval_loss" in row] == [2, 4, 6]
    for name in ("checkpoint-6", "draft/master"):
        same_weights(run, straight, name)
    kept = [json.loads((r.draft / "drafttrain.json").read_text())["validation"]["step"] for r in (run, straight)]
    assert kept[0] == kept[1]


def test_a_signal_while_validating_drops_what_was_found_so_far(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=4, save_steps=100, eval_steps=2)
    target = make_target(recipe)
    straight, run = open_run(tmp_path / "straight", recipe), open_run(tmp_path / "run", recipe)
    whole, _ = make_trainer(recipe, straight, target)
    whole.fit()
    trainer, _ = make_trainer(recipe, run, target)

    def once(batch):
        if not trainer.stop.number:
            send()
        return batch

    trainer.sources["validation"] = Wrapped(trainer.sources["validation"], once)
    trainer.stop.hold()
    with trainer.stop.listening(run.path):
        trainer.fit()
    assert trainer.asked == signal.SIGTERM and trainer.state.global_step == 2
    assert len(trainer.sources["validation"].seen) == 1
    assert [c.name for c in run.checkpoints()] == ["checkpoint-2"]
    again, _ = make_trainer(recipe, run, target)
    again.fit()
    assert told(run) == told(straight)


def test_a_signal_before_training_ends_the_work_at_once_and_leaves_it_whole(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    run = open_run(tmp_path / "run", recipe)

    def say(message: str) -> None:
        if message.startswith("draft vocabulary"):
            send(signal.SIGUSR1)

    with pytest.raises(Interrupted, match="SIGUSR1 came; nothing unfinished is kept") as caught:
        train(recipe, run, make_target(recipe), say)
    assert caught.value.status == 138
    assert not run.checkpoints() and not run.log.exists()
    train(recipe, run, make_target(recipe), quiet)
    assert run.draft.exists()


def test_preparing_and_the_demo_say_how_to_go_on(tmp_path, cli, monkeypatch) -> None:
    recipe, run = write_recipe(tmp_path, settings(tmp_path)), tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("drafttrain.data.prepare.prepare", lambda *_: send())
        status, _, err = cli("prepare", recipe, "--output", run)
    assert (status, err.splitlines()[-1].partition(";")[0]) == (143, "stopped: SIGTERM came")
    assert cli("prepare", recipe, "--output", run)[0] == 0

    monkeypatch.setattr(demo, "prompt_folder", lambda target: tmp_path)
    monkeypatch.setattr(demo, "prepare", lambda *_: send())
    target = load_recipe(recipe).target.name_or_path
    with pytest.raises(Interrupted, match=f"To go on, run the same command again, or: .* {tmp_path}/demo"):
        demo.run_demo(target, 1.0, tmp_path / "demo", False, quiet, None)


def test_once_is_enough_and_a_second_ctrl_c_ends_the_work_at_once(tmp_path, monkeypatch) -> None:
    stop = Stop()
    stop.hold()
    with stop.listening(tmp_path):
        send(signal.SIGINT)
        send(signal.SIGINT)  # Passed on by a launcher.
        send(signal.SIGTERM)
    assert stop.number == signal.SIGINT
    monkeypatch.setattr(signals, "AGAIN", 0.0)
    with pytest.raises(Interrupted) as caught, stop.listening(tmp_path):
        send(signal.SIGINT)
    assert caught.value.status == 130
    with pytest.raises(Interrupted) as caught, Stop().listening(tmp_path, speaks=False):
        send()
    assert str(caught.value) == ""


def test_outside_the_main_thread_nothing_is_handled(tmp_path) -> None:
    handler, found = signal.getsignal(signal.SIGTERM), []

    def listen() -> None:
        with Stop().listening(tmp_path):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [handler]


def test_one_rank_is_told_and_all_stop_at_the_same_step(tmp_path) -> None:
    recipe = write_recipe(tmp_path, settings(tmp_path, num_train_epochs=2000, max_tokens_per_batch=64, save_steps=5000))
    run = tmp_path / "run"
    pids = ranks(lambda: run_training(recipe, None, run, False, False), tmp_path)
    ends = time.monotonic() + 200
    while len(read_log(run / "log.jsonl")) < 6 and time.monotonic() < ends:
        time.sleep(0.05)
    os.kill(pids[1], signal.SIGTERM)
    asked = time.monotonic()
    assert wait(*pids) == [143, 143], (tmp_path / "rank-0.txt").read_text()
    assert time.monotonic() - asked < 60
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    (checkpoint,) = run.glob("checkpoint-*")
    assert f"stopped: SIGTERM came; {checkpoint.name} is saved" in said[0] and "SIGTERM" not in said[1]
    assert json.loads((checkpoint / "position.json").read_text())["processes"] == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file.name for file in checkpoint.iterdir()}
