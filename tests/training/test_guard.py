"""Bad steps: what counts as one, what is written of it, and that a skipped one leaves no trace in the weights."""

import json
import math
import statistics

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import run_training
from drafttrain.data.batching import TokenBudgetSampler
from drafttrain.data.features import OnlineFeatures
from drafttrain.data.run_folder import RunError
from drafttrain.recipe import TrainingConfig
from drafttrain.training import guard
from drafttrain.training.callbacks import read_log
from drafttrain.training.guard import Guard
from tests.training.forks import ranks, wait
from tests.training.test_signals import At, told
from tests.training.test_trainer import Stop, Wrapped, interrupt
from tests.training.tiny_run import make_recipe, make_target, make_trainer, open_run, settings, write_recipe


def judge(count: int = 16, **training) -> Guard:
    """A guard that has seen losses 1, 2, .., count and gradient norms ten times as large."""
    found = Guard(make_settings(**training))
    for i in range(1, count + 1):
        assert found.judge(float(i), 10.0 * i) is None
    return found


def make_settings(**training) -> TrainingConfig:
    return TrainingConfig(**training)


def test_a_spike_is_measured_by_the_median_of_the_good_steps() -> None:
    found = judge(spike_factor=3)
    assert found.medians() == {"median_loss": 8.5, "median_grad_norm": 85.0}
    assert found.judge(25.5, 255.0) is None  # Three times the median is none yet.
    found = judge(spike_factor=3)
    assert found.judge(34.0, 1.0) == ("loss is 34", " (4 times the median of the steps before)")
    assert found.judge(1.0, 510.0) == ("gradient norm is 510", " (6 times the median of the steps before)")
    assert found.losses == [float(i) for i in range(1, 17)] and found.skipped == found.in_a_row == 2
    assert found.judge(1.0, None) is None and found.in_a_row == 0 and found.skipped == 2
    assert (len(found.losses), len(found.norms)) == (17, 16)


def test_few_steps_make_no_median_and_old_ones_leave_it() -> None:
    assert judge(15, spike_factor=2).judge(1e9, 1e9) is None
    assert judge(16).judge(1e9, 1e9) is None  # No factor: spikes are no fault.
    found = judge(guard.WINDOW + 8, spike_factor=2)
    assert found.losses == [float(i) for i in range(9, guard.WINDOW + 9)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_always_bad(value) -> None:
    assert judge(0).judge(value, 1.0) == (f"loss is {value}", "")
    assert judge(0).judge(1.0, value) == (f"gradient norm is {value}", "")


def test_skips_are_limited_in_a_row() -> None:
    found = judge(0, on_bad_step="skip", max_skips=2)
    for stops in (False, False, True):
        found.judge(math.nan, 1.0)
        assert found.stops() is stops
    found.judge(1.0, 1.0)
    found.judge(math.nan, 1.0)
    assert not found.stops() and "2" in found.mend()
    stopping = judge(0)
    stopping.judge(math.nan, 1.0)
    assert stopping.stops()


def planted(folder, steps=(2,), name="run", logging_steps=1, **training):
    """A trainer of eight batches of 64 tokens or so, an epoch, whose loss is not finite in these steps (0, 1, ..)."""
    options = {"max_tokens_per_batch": 64, "num_train_epochs": 1, "eval_steps": 100, "save_steps": 1}
    recipe = make_recipe(folder, logging_steps=logging_steps, **options | training)
    trainer, prepared = make_trainer(recipe, open_run(folder / name, recipe), make_target(recipe))
    lengths = [len(row["input_ids"]) for row in prepared.rows["train"]]
    batches = TokenBudgetSampler(lengths, 64, 1, recipe.training.seed).batches()
    bad = {row for step in steps for row in batches[step]}

    def plant(batch):
        if bad & set(batch.index.tolist()):
            batch.target_lse.fill_(-1e30)  # Finite, and the loss is not.
        return batch

    trainer.sources["train"] = Wrapped(trainer.sources["train"], plant)
    return trainer, prepared, batches


def state(run, step: int):
    folder = run.path / f"checkpoint-{step}"
    moments = torch.load(folder / "optimizer.pt")["state"]
    return load_file(folder / "model.safetensors"), [v for s in moments.values() for v in s.values()]


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(tmp_path, capfd) -> None:
    trainer, prepared, batches = planted(tmp_path, on_bad_step="skip", save_total_limit=9)
    trainer.fit()
    (before, moments), (after, same), (later, _) = (state(trainer.run, step) for step in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(a, b) for a, b in zip(moments, same, strict=True))
    assert any(not torch.equal(after[name], later[name]) for name in after)
    assert all(tensor.isfinite().all() for tensor in later.values())
    rows = {row["step"]: row for row in read_log(trainer.run.log) if "learning_rate" in row}
    assert "loss" not in rows[3] and "grad_norm" not in rows[3] and rows[3]["skipped_steps"] == 1
    assert "skipped_steps" not in rows[2] and math.isfinite(rows[4]["loss"]) and rows[4]["skipped_steps"] == 1
    dumped = json.loads((trainer.run.path / "bad_batches" / "step-3.json").read_text())
    (batch,) = dumped["batches"]
    assert dumped["step"] == 3 and dumped["skipped"] is True and dumped["found"].startswith("loss is ")
    assert isinstance(dumped["loss"], str) and dumped["median_loss"] == statistics.median(
        [rows[1]["loss"], rows[2]["loss"]]
    )
    assert [row["index"] for row in batch["rows"]] == batches[2]
    for row in batch["rows"]:
        wanted = prepared.rows["train"][row["index"]]
        assert row["input_ids"] == wanted["input_ids"] and row["loss_mask"] == list(map(int, wanted["loss_mask"]))
        assert row["source"] == wanted["source"]
    said = capfd.readouterr().err
    assert f"skipped a step. The {dumped['found']} at step 3 on rows {batches[2]} of the training data" in said


def test_the_log_means_the_good_steps_alone(tmp_path) -> None:
    single, _, _ = planted(tmp_path, on_bad_step="skip")
    single.fit()
    trainer, _, _ = planted(tmp_path, name="pairs", on_bad_step="skip", logging_steps=4)
    trainer.fit()
    losses = [row["loss"] for row in read_log(single.run.log) if row["step"] <= 4 and "loss" in row]
    (row,) = [row for row in read_log(trainer.run.log) if row["step"] == 4 and "learning_rate" in row]
    assert len(losses) == 3 and row["loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_a_bad_step_stops_the_run_which_goes_on_when_told_to_skip_it(tmp_path) -> None:
    trainer, _, batches = planted(tmp_path)
    with pytest.raises(RunError, match=r"The loss is \S+ at step 3 on rows") as caught:
        trainer.fit()
    assert "bad_batches/step-3.json" in str(caught.value) and "training.on_bad_step=skip" in str(caught.value)
    assert json.loads((trainer.run.path / "bad_batches" / "step-3.json").read_text())["skipped"] is False
    again, _, _ = planted(tmp_path, on_bad_step="skip")  # The same folder takes that recipe.
    again.fit()
    assert again.state.global_step == len(batches) and again.guard.skipped == 1
    straight, _, _ = planted(tmp_path, name="straight", on_bad_step="skip")
    straight.fit()
    assert told(again.run) == told(straight.run)
    ends = [state(one.run, len(batches))[1] for one in (again, straight)]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_too_many_skips_in_a_row_stop_the_run(tmp_path) -> None:
    trainer, _, _ = planted(tmp_path, steps=(1, 2, 3, 4), on_bad_step="skip", max_skips=2)
    with pytest.raises(RunError, match=r"at step 4 .*3 steps in a row were bad, training.max_skips is 2"):
        trainer.fit()
    assert len(list((trainer.run.path / "bad_batches").iterdir())) == 3


def test_a_spike_stops_where_the_log_of_an_unguarded_run_has_one(tmp_path) -> None:
    options = {"num_train_epochs": 6, "logging_steps": 1, "learning_rate": 1e-2}
    free, _, _ = planted(tmp_path, steps=(), name="free", **options)
    free.fit()
    rows = [row for row in read_log(free.run.log) if "loss" in row]
    assert len(rows) > 24
    factor, expected = 1.15, None
    for i in range(guard.FEWEST, len(rows)):
        medians = [statistics.median(row[name] for row in rows[max(0, i - guard.WINDOW) : i]) for name in FIGURES]
        if any(rows[i][name] > factor * median for name, median in zip(FIGURES, medians, strict=True)):
            expected = rows[i]["step"]
            break
    assert expected is not None, "the run is to have a step that stands out"
    trainer, _, _ = planted(tmp_path, steps=(), spike_factor=factor, **options)
    with pytest.raises(RunError, match=f"at step {expected} .*times the median of the steps before"):
        trainer.fit()


FIGURES = ("loss", "grad_norm")


def test_a_resumed_run_judges_by_the_same_medians(tmp_path) -> None:
    trainer, _, _ = planted(tmp_path, on_bad_step="skip")

    trainer.add_callback(At(6, lambda: interrupt(6)(6)))
    with pytest.raises(Stop):
        trainer.fit()
    again, _, _ = planted(tmp_path, on_bad_step="skip")
    again.fit()
    straight, _, _ = planted(tmp_path, name="straight", on_bad_step="skip")
    straight.fit()
    assert again.guard.state() == straight.guard.state()
    assert len(again.guard.losses) == again.state.global_step - 1 and again.guard.skipped == 1


def test_a_nan_on_one_rank_is_skipped_by_all(tmp_path, monkeypatch) -> None:
    options = {"max_tokens_per_batch": 64, "num_train_epochs": 1, "save_steps": 2, "on_bad_step": "skip"}
    recipe, run = write_recipe(tmp_path, settings(tmp_path, **options)), tmp_path / "run"
    attach = OnlineFeatures.attach

    def plant(self, batch):
        out = attach(self, batch)
        if torch.is_grad_enabled() and 5 in batch.index:
            out.target_lse.fill_(-1e30)
        return out

    monkeypatch.setattr(OnlineFeatures, "attach", plant)
    pids = ranks(lambda: run_training(recipe, None, run, False, False), tmp_path)
    assert wait(*pids) == [0, 0], (tmp_path / "rank-0.txt").read_text() + (tmp_path / "rank-1.txt").read_text()
    (file,) = (run / "bad_batches").iterdir()
    dumped = json.loads(file.read_text())
    assert [batch["rank"] for batch in dumped["batches"]] == [0, 1]
    bad = [[row["index"] for row in batch["rows"]] for batch in dumped["batches"] if isinstance(batch["loss"], str)]
    assert len(bad) == 1 and 5 in bad[0]
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert "skipped a step. The loss is" in said[0] and "skipped a step" not in said[1]
    weights = load_file(max(run.glob("checkpoint-*"), key=lambda f: int(f.name[11:])) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
