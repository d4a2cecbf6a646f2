"""What the log says: trackers get the same figures, and throughput, FLOPs and memory are what they are called."""

import resource

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.data.batching import collate
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import Batch
from drafttrain.drafts.loading import new_draft
from drafttrain.recipe import parse_recipe
from drafttrain.training.callbacks import JsonLog, read_log
from drafttrain.training.figures import flops_per_token, peak_flops
from drafttrain.training.run import train
from tests.training.test_trainer import quiet
from tests.training.tiny_run import make_recipe, make_target, make_trainer, open_run, settings

H, V, WORDS, STEPS, INNER, HEADS, KV, D = 32, 99, 60, 3, 48, 4, 2, 8


def test_tensorboard_has_every_figure_of_the_log(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=4, report_to=["tensorboard"])
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, make_target(recipe), quiet)
    (file,) = run.path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    rows = read_log(run.log)
    for name, tag in (
        ("loss", "train/loss"),
        ("grad_norm", "train/grad_norm"),
        ("learning_rate", "train/learning_rate"),
        ("step_acceptance/2", "train/step_acceptance/2"),
        ("tokens_per_second", "train/tokens_per_second"),
        ("memory_gib", "train/memory_gib"),
        ("eval_acceptance_length", "eval/acceptance_length"),
        ("eval_loss", "eval/loss"),
    ):
        wanted = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row]
        assert wanted and [(event.step, event.value) for event in events.Scalars(tag)] == wanted, name


@pytest.mark.parametrize("name", ["no_such_tracker", "comet_ml"])
def test_a_tracker_that_is_not_here_is_named_before_anything_is_trained(tmp_path, name) -> None:
    recipe = make_recipe(tmp_path, report_to=["tensorboard", name])
    with pytest.raises(RunError, match=f"report_to names {name}, .* tensorboard.* Mend: "):
        make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))


def test_a_full_disk_under_the_log_is_an_error_of_the_run(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=2)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    (log,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, JsonLog)]
    log.path = type(trainer.run.path)("/dev/full")
    with pytest.raises(RunError, match=r"/dev/full could not be written \(No space left on device\)"):
        trainer.fit()


def test_throughput_and_memory(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=4, logging_steps=2, eval_steps=100)
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    trainer.fit()
    rows = [row for row in read_log(trainer.run.log) if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["flops_per_second"] == pytest.approx(row["tokens_per_second"] * flops_per_token(trainer.model))
        assert 0.1 < row["memory_gib"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        assert row["grad_norm"] > 0 and row["learning_rate"] > 0
        assert "mfu" not in row and "device_memory_gib" not in row  # A CPU's peak is not known.
    assert peak_flops(torch.device("cpu")) is None
    spent = 60 * (rows[1]["minutes"] - rows[0]["minutes"])
    tokens = sum(len(row["input_ids"]) for row in prepared.rows["train"]) * 2 / 8  # 8 batches in two epochs, about even
    assert rows[1]["tokens_per_second"] * spent == pytest.approx(2 * tokens, rel=0.4)


def draft_of(folder, method: str, **draft):
    values = settings(folder) | {"method": method, "draft": draft}
    if method == "medusa":
        del values["training"]["ttt_steps"]
    if draft.get("own_heads"):
        values["data"]["draft_vocab"] = None  # Engines want the whole vocabulary of them.
    recipe = parse_recipe(values, folder)
    target = make_target(recipe)
    prepared = prepare(recipe, open_run(folder / method, recipe), target, say=quiet)
    made = new_draft(recipe, target, prepared.layers, prepared.vocab.ids, prepared.statistics, prepared.kept_layers)
    return made, prepared, recipe, target


def test_flops_of_a_token_by_hand(tmp_path) -> None:
    eagle, *_ = draft_of(tmp_path, "eagle3")
    attention = 2 * H * (HEADS + 2 * KV) * D + HEADS * D * H  # q, k, v read embedding and state.
    layer = attention + 3 * H * INNER + WORDS * H
    assert flops_per_token(eagle) == 4 * 3 * H * H + 6 * STEPS * layer
    medusa, *_ = draft_of(tmp_path, "medusa", num_heads=3)
    assert flops_per_token(medusa) == 6 * 3 * H * H + 4 * 3 * WORDS * H
    (tmp_path / "own").mkdir()
    own, *_ = draft_of(tmp_path / "own", "medusa", num_heads=3, own_heads=True)
    assert flops_per_token(own) == 6 * 3 * (H * H + V * H)


def test_flops_of_a_token_are_those_that_torch_counts(tmp_path) -> None:
    eagle, prepared, recipe, target = draft_of(tmp_path, "eagle3")
    rows = prepared.rows["train"][:8]
    batch = prepared.source(recipe, target, "train").attach(Batch(**collate(rows)))
    with FlopCounterMode(display=False) as counter:
        eagle(batch).objective.backward()
    padded = batch.input_ids.numel()
    ratio = counter.get_total_flops() / (flops_per_token(eagle) * padded)
    assert 0.8 < ratio < 1.25
