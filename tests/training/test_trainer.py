"""The trainer: gradients do not depend on the batching, a resume is exact, figures equal a second method."""

import copy
import json
import random
import resource
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from drafttrain.data.batching import TokenBudgetSampler, collate
from drafttrain.data.conversations import DataError
from drafttrain.data.features import FeatureSource
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import Batch
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.recipe import parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.training.callbacks import read_log
from drafttrain.training.checkpoints import list_files
from drafttrain.training.run import start_up_gate, train
from tests.training.tiny_run import (
    make_recipe,
    make_target,
    make_trainer,
    open_run,
    prompt_rows,
    settings,
    words,
    write_rows,
)

TIMED = (
    "minutes",
    "tokens_per_second",
    "flops_per_second",
    "memory_gib",
    "data_wait",
    "eval_acceptance_seconds",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def quiet(message: str) -> None:
    pass


class Watch(TrainerCallback):
    """Calls `act(step)` after each optimizer step and keeps a copy of every step's gradients."""

    def __init__(self, act=lambda step: None):
        self.act, self.gradients = act, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})

    def on_step_end(self, args, state, control, **kwargs):
        self.act(state.global_step)


class Wrapped(FeatureSource):
    """A source that passes every batch through `change` and remembers which rows it has seen."""

    def __init__(self, source, change=lambda batch: batch):
        self.source, self.change, self.seen = source, change, []

    def attach(self, batch: Batch) -> Batch:
        self.seen.append(batch.index.tolist())
        return self.change(self.source.attach(batch))


def text_of_lengths(folder, lengths) -> None:
    """Training rows of exactly these many tokens (the tiny tokenizer puts no BOS before plain text)."""
    rng = random.Random(1)
    write_rows(folder / "train.jsonl", [{"text": words(rng, length)} for length in lengths])


# Batches, accumulation and padding.


def trajectory(folder, name: str, **training):
    recipe = make_recipe(folder, num_train_epochs=6, eval_steps=100, save_steps=100, **training)
    trainer, _ = make_trainer(recipe, open_run(folder / name, recipe), make_target(recipe))
    watch = Watch()
    trainer.add_callback(watch)
    trainer.fit()
    return trainer, watch.gradients, [row["loss"] for row in read_log(trainer.run.log) if "loss" in row]


def test_one_batch_of_eight_trains_as_eight_batches_of_one(tmp_path) -> None:
    text_of_lengths(tmp_path, (13, 24, 14, 22, 20, 16, 19, 17))
    options = {"max_grad_norm": 0.0}
    whole, first, losses = trajectory(tmp_path, "whole", max_tokens_per_batch=8 * 24, **options)
    options |= {"gradient_accumulation_steps": 8}
    split, second, others = trajectory(tmp_path, "split", max_tokens_per_batch=24, **options)
    assert (len(whole.sampler), len(split.sampler), len(first), len(losses)) == (1, 8, 6, 6)
    for name, gradient in first[0].items():
        residual = gradient - second[0][name]
        assert residual.abs().max() <= 1e-5 * gradient.abs().max() + 1e-9, name
        assert abs(float(residual.mean())) <= 1e-6 * float(gradient.abs().mean()) + 1e-10, name
    assert losses[0] == pytest.approx(others[0], abs=1e-5)


@pytest.mark.parametrize("tokens", [24, 48, 100])
def test_the_trajectory_is_the_same_for_every_split_of_an_epoch(tmp_path, tokens) -> None:
    text_of_lengths(tmp_path, (13, 24, 14, 22, 20, 16, 19, 17))
    _, _, losses = trajectory(tmp_path, "whole", max_tokens_per_batch=8 * 24)
    trainer, _, others = trajectory(tmp_path, "split", max_tokens_per_batch=tokens, gradient_accumulation_steps=8)
    assert 1 < len(trainer.sampler) <= 8
    residuals = [a - b for a, b in zip(losses, others, strict=True)]
    assert max(abs(residual) for residual in residuals) < 1e-5
    assert abs(sum(residuals) / len(residuals)) < 5e-6
    assert losses[-1] < losses[0]


def test_the_first_loss_is_the_objective_divided_by_the_step_0_rows(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_tokens_per_batch=2000, max_steps=1)
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    batch = trainer.sources["train"].attach(Batch(**collate(prepared.rows["train"])))
    output = trainer.model(batch)
    rows = sum(sum(a and b for a, b in zip(r["loss_mask"][1:], r["loss_mask"][2:])) for r in prepared.rows["train"])  # noqa: B905
    assert output.figures.rows[0] == rows
    trainer.fit()
    first = next(row for row in read_log(trainer.run.log) if "loss" in row)
    assert first["loss"] == pytest.approx(output.objective.item() / rows, rel=1e-5)
    by_step = [first[f"step_loss/{k}"] * float(output.figures.rows[k]) for k in range(3)]
    assert first["loss"] * rows == pytest.approx(sum(0.8**k * loss for k, loss in enumerate(by_step)), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_epoch_trains_every_row_once(tmp_path, accumulation) -> None:
    recipe = make_recipe(
        tmp_path, num_train_epochs=4, max_tokens_per_batch=64, gradient_accumulation_steps=accumulation, eval_steps=100
    )
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    source = trainer.sources["train"] = Wrapped(trainer.sources["train"])
    trainer.fit()
    batches, size = source.seen, len(source.seen) // 4
    epochs = [batches[i : i + size] for i in range(0, len(batches), size)]
    assert len(epochs) == 4 and trainer.state.global_step == 4 * -(-size // accumulation)
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(len(prepared.rows["train"])))
    assert epochs[0] != epochs[1]


# Figures.


def by_hand(trainer, rows, steps: int) -> tuple[list[int], list[int], list[int]]:
    """Rows, hits and joint hits of each step, position by position with the model's own logits."""
    draft, target = trainer.model, trainer.sources["train"].target
    counts, hits, joint = [0] * steps, [0] * steps, [0] * steps
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        batch = trainer.sources["train"].attach(Batch(**collate([row])))
        with torch.no_grad():
            chosen = target.model(ids).logits[0].argmax(-1).tolist()
            states = draft.unroll(ids, batch.features, steps)
            said = [draft.draft_ids[(state[0] @ draft.lm_head.weight.T).argmax(-1)].tolist() for state in states]
        mask = row["loss_mask"]
        for p in range(len(mask)):
            alive = True
            for k in range(steps):
                if p + 2 + k >= len(mask) or not all(mask[p + 1 : p + 3 + k]):
                    break
                hit = said[k][p] == chosen[p + 1 + k]
                alive = alive and hit
                counts[k] += 1
                hits[k] += hit
                joint[k] += alive
    return counts, hits, joint


def test_logged_acceptance_equals_hits_counted_by_hand(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_tokens_per_batch=2000, max_steps=1, eval_steps=1, learning_rate=1e-12)
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    with torch.no_grad():  # A draft that is right now and then.
        trainer.model.norm.weight.mul_(0.3)
    counts, hits, _ = by_hand(trainer, prepared.rows["train"], 3)
    trainer.fit()
    log = read_log(trainer.run.log)
    row = next(row for row in log if "loss" in row)
    assert 0 < hits[0] < counts[0] and counts == sorted(counts, reverse=True)
    for k in range(3):
        assert row[f"step_acceptance/{k}"] == pytest.approx(hits[k] / counts[k])
    counts, hits, joint = by_hand(trainer, prepared.rows["validation"], 3)
    found = next(row for row in log if "eval_loss" in row)
    assert found["eval_teacher_forced_length"] == pytest.approx(
        1 + sum(j / n for j, n in zip(joint, counts, strict=True))
    )
    assert found["eval_step_acceptance/1"] == pytest.approx(hits[1] / counts[1])
    assert joint[2] < hits[2] or hits[2] == 0


def test_validation_leaves_the_draft_in_training_mode_and_its_weights_alone(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.model.train()
    first = trainer.validate()
    assert trainer.model.training
    trainer.model.eval()
    assert trainer.validate() == first
    assert not trainer.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(p.grad is None for p in trainer.model.parameters())
    modes = []
    trainer.add_callback(Watch(lambda step: modes.append(trainer.model.training)))
    trainer.fit()  # eval_steps 4: steps 5 and later come after a validation
    assert len(modes) > 5 and all(modes)


def test_every_step_is_validated_once(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_tokens_per_batch=64)
    run = open_run(tmp_path / "run", recipe)
    target = make_target(recipe)
    train(recipe, run, target, quiet)
    train(recipe, run, target, quiet)
    steps = [row["step"] for row in read_log(run.log) if "eval_loss" in row]
    assert steps == [4, 8, 12, 16]  # 8 and 16 end an epoch, 16 the run
    recipe = make_recipe(tmp_path, max_tokens_per_batch=64, max_steps=6)
    train(recipe, open_run(tmp_path / "other", recipe), target, quiet)
    assert [row["step"] for row in read_log(tmp_path / "other" / "log.jsonl") if "eval_loss" in row] == [4, 6]


# Resume.


class Stop(Exception):
    """What the test raises to interrupt a run."""


def interrupt(at: int):
    def act(step: int) -> None:
        if step == at:
            raise Stop

    return act


def finish(folder, recipe, stop_at: int | None = None):
    run = open_run(folder, recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    if stop_at is not None:
        trainer.add_callback(Watch(interrupt(stop_at)))
        with pytest.raises(Stop):
            trainer.fit()
    else:
        trainer.fit()
    return trainer


def untimed(path) -> list[dict]:
    rows = [{key: value for key, value in row.items() if key not in TIMED} for row in read_log(path)]
    return [row for row in rows if "train_loss" not in row]


@pytest.mark.parametrize(("accumulation", "schedule"), [(1, "wsd"), (2, "cosine")])
def test_six_steps_are_three_and_a_resume_and_three(tmp_path, accumulation, schedule) -> None:
    recipe = make_recipe(
        tmp_path,
        max_tokens_per_batch=96 // accumulation,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=3,
        max_steps=6,
        save_steps=3,
        eval_steps=3,
        lr_scheduler_type=schedule,
    )
    straight = finish(tmp_path / "straight", recipe)
    steps_in_epoch = -(-len(straight.sampler) // accumulation)
    assert 3 % steps_in_epoch, "step 3 is to lie inside an epoch"
    finish(tmp_path / "broken", recipe, stop_at=5)
    assert [row["step"] for row in read_log(tmp_path / "broken" / "log.jsonl")][-1] == 4
    resumed = finish(tmp_path / "broken", recipe)
    assert resumed.state.global_step == 6
    for name in ("checkpoint-3", "checkpoint-6"):
        a, b = (load_file(tmp_path / run / name / "model.safetensors") for run in ("straight", "broken"))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        a, b = (torch.load(tmp_path / run / name / "optimizer.pt") for run in ("straight", "broken"))
        assert len(a["state"]) == len(list(straight.model.parameters()))
        for index, moments in a["state"].items():
            assert all(torch.equal(value, b["state"][index][key]) for key, value in moments.items())
        a, b = (torch.load(tmp_path / run / name / "scheduler.pt") for run in ("straight", "broken"))
        assert a["_last_lr"] == b["_last_lr"] and a["last_epoch"] == b["last_epoch"] == int(name[-1])
    assert untimed(tmp_path / "straight" / "log.jsonl") == untimed(tmp_path / "broken" / "log.jsonl")


def test_a_resume_in_a_later_epoch_reads_the_rows_that_are_next(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_tokens_per_batch=64, num_train_epochs=3, save_steps=1, eval_steps=100)
    target = make_target(recipe)

    def order(folder, stop_at=None):
        trainer, _ = make_trainer(recipe, open_run(folder, recipe), target)
        source = trainer.sources["train"] = Wrapped(trainer.sources["train"])
        if stop_at:
            trainer.add_callback(Watch(interrupt(stop_at)))
            with pytest.raises(Stop):
                trainer.fit()
        else:
            trainer.fit()
        return source.seen

    straight = order(tmp_path / "straight")
    length = len(straight) // 3
    for stop in (length + 2, 2 * length, 2 * length + 1):  # inside the second epoch, at its end, behind its end
        seen = order(tmp_path / f"broken-{stop}", stop)
        assert seen == straight[:stop]
        assert order(tmp_path / f"broken-{stop}") == straight[stop - 1 :]


def test_a_finished_run_takes_no_further_step(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_steps=6, max_tokens_per_batch=96)
    train(recipe, open_run(tmp_path / "run", recipe), say=quiet)
    before = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    train(recipe, open_run(tmp_path / "run", recipe), say=quiet)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    after = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_minutes_and_the_learning_rate_go_on_after_a_resume(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_minutes=60, max_steps=6, save_steps=2, eval_steps=100)
    trainer = finish(tmp_path / "run", recipe, stop_at=2 + 1)
    state = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    saved = json.loads(state.read_text())
    assert 0 < saved["stateful_callbacks"]["Budget"]["args"]["elapsed"] <= trainer.budget.seconds()
    saved["stateful_callbacks"]["Budget"]["args"]["elapsed"] = 57 * 60.0  # As if two steps had taken 57 minutes.
    state.write_text(json.dumps(saved))
    list_files(state.parent)
    trainer = finish(tmp_path / "run", recipe)
    assert trainer.budget.seconds() > 57 * 60
    rows = {row["step"]: row for row in read_log(tmp_path / "run" / "log.jsonl") if "loss" in row}
    assert rows[2]["minutes"] < 1 < 57 <= rows[3]["minutes"]
    # After warm-up, 95% of the minutes are spent: wsd is 3/4 through its decay from 1 to 0.05.
    assert rows[4]["learning_rate"] == pytest.approx(3e-3 * (1 - 0.95 * 0.75), rel=1e-3)


def test_training_stops_when_the_minutes_are_up(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_minutes=1e-6, num_train_epochs=50)
    train(recipe, open_run(tmp_path / "run", recipe), say=quiet)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


# What is kept.


def test_the_best_draft_on_validation_is_kept_not_the_last(tmp_path) -> None:
    recipe = make_recipe(tmp_path, num_train_epochs=12, learning_rate=0.02, eval_steps=3, lr_scheduler_type="constant")
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, say=quiet)
    lengths = {row["step"]: row["eval_acceptance_length"] for row in read_log(run.log) if "eval_loss" in row}
    kept = json.loads((run.draft / "drafttrain.json").read_text())["validation"]
    assert kept["eval_acceptance_length"] == max(lengths.values()) == lengths[kept["step"]]
    assert lengths[max(lengths)] < max(lengths.values()), "the run is to have passed its best"
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    trainer.model.load_state_dict(Eagle3Draft.from_pretrained(run.draft / "master").state_dict())
    assert trainer.measure()["eval_acceptance_length"] == kept["eval_acceptance_length"]
    assert len(run.checkpoints()) == recipe.training.save_total_limit


def test_without_validation_rows_the_last_draft_is_kept(tmp_path) -> None:
    values = settings(tmp_path, max_steps=3)
    del values["data"]["validation"]
    recipe = parse_recipe(values, tmp_path)
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, say=quiet)
    master, last = (load_file(f / "model.safetensors") for f in (run.draft / "master", run.path / "checkpoint-3"))
    assert all(torch.equal(master[name], last[name]) for name in last)


def test_a_validation_row_over_the_budget_is_refused_before_training(tmp_path) -> None:
    recipe = make_recipe(tmp_path, max_tokens_per_batch=32)
    write_rows(tmp_path / "validation.jsonl", [{"text": words(random.Random(0), 40)}])
    with pytest.raises(DataError, match="has 40 tokens, training.max_tokens_per_batch is 32"):
        make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))


# What goes wrong.


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rows(tmp_path) -> None:
    recipe = make_recipe(tmp_path, save_steps=2, max_tokens_per_batch=64)
    run = open_run(tmp_path / "run", recipe)
    trainer, prepared = make_trainer(recipe, run, make_target(recipe))
    lengths = [len(row["input_ids"]) for row in prepared.rows["train"]]
    third = TokenBudgetSampler(lengths, 64, 1, recipe.training.seed).batches()[2]

    def plant(batch: Batch) -> Batch:
        if third[0] in batch.index:
            next(trainer.model.parameters()).data.fill_(float("nan"))
        return batch

    trainer.sources["train"] = Wrapped(trainer.sources["train"], plant)
    with pytest.raises(RunError, match=r"loss is nan at step 3 on rows") as caught:
        trainer.fit()
    assert str(third) in str(caught.value)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-2"]
    assert all(t.isfinite().all() for t in load_file(run.checkpoints()[0] / "model.safetensors").values())


@contextmanager
def file_size_limit(size: int):
    """Writing more than `size` bytes to one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [30, 100])
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_resumes(tmp_path, kilobytes) -> None:
    recipe = make_recipe(tmp_path, max_steps=6, save_steps=2, eval_steps=100)
    straight = finish(tmp_path / "straight", recipe)
    sizes = {path.name: path.stat().st_size for path in straight.run.checkpoints()[-1].iterdir()}
    assert 30_000 < sizes["model.safetensors"] < 100_000 < sizes["optimizer.pt"], sizes
    run = open_run(tmp_path / "run", recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    limit = file_size_limit(kilobytes * 1000)
    trainer.add_callback(Watch(lambda step: limit.__enter__() if step == 3 else None))
    try:
        with pytest.raises(RunError, match=r"checkpoint-4 could not be saved .*checkpoint-2 is intact"):
            trainer.fit()
    finally:
        limit.__exit__(None, None, None)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoint-2", "log.jsonl", "prepared", "recipe.yaml"]
    finish(run.path, recipe)
    a, b = (load_file(path / "checkpoint-6" / "model.safetensors") for path in (run.path, straight.run.path))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_full_disk_while_the_best_draft_is_written_keeps_the_one_before(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    run = open_run(tmp_path / "run", recipe)
    target = make_target(recipe)
    prepare(recipe, run, target, quiet)
    with file_size_limit(20_000), pytest.raises(RunError, match="untrained could not be written"):
        train(recipe, run, target, quiet)
    assert sorted(path.name for path in run.path.iterdir()) == ["prepared", "recipe.yaml"]
    train(recipe, run, target, quiet)
    best = {path: path.read_bytes() for path in run.draft.rglob("*") if path.is_file()}
    (run.draft / "drafttrain.json").write_text("{}")  # The next validation counts as better.
    longer = make_recipe(tmp_path, num_train_epochs=3)
    with file_size_limit(20_000), pytest.raises(RunError, match="draft could not be written"):
        train(longer, run, target, quiet)
    assert {path for path in run.draft.rglob("*") if path.is_file()} == set(best)
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("name", "change"),
    [("final_rms", lambda t: t * 1000), ("final_rms", lambda t: t * float("inf")), ("feature_rms", lambda t: t * 0)],
)
def test_the_gate_stops_a_draft_whose_features_are_of_a_wrong_scale(tmp_path, name, change) -> None:
    recipe = make_recipe(tmp_path)
    run = open_run(tmp_path / "run", recipe)
    target = make_target(recipe)
    trainer, prepared = make_trainer(recipe, run, target)
    said = []
    start_up_gate(trainer.model, recipe, prepared, trainer.sources["train"], said.append)
    assert "start-up gate: step-0 loss" in said[0]
    prepared.statistics[name] = change(prepared.statistics[name])
    with torch.no_grad():
        trainer.model.initialise(**prepared.statistics)
    with pytest.raises(RunError, match="worse than uniform guessing over 60 words"):
        start_up_gate(trainer.model, recipe, prepared, trainer.sources["train"], said.append)


def test_the_gate_looks_at_a_batch_where_the_draft_is(tmp_path) -> None:
    recipe = make_recipe(tmp_path)
    run = open_run(tmp_path / "run", recipe)
    trainer, prepared = make_trainer(recipe, run, make_target(recipe))
    seen = []

    class Elsewhere(torch.nn.Linear):
        draft_vocab_size, start_limit = 60, 9.0

        def calibrate(self, batch) -> float:
            values = [value for value in vars(batch).values() if value is not None]
            seen.extend(value.device.type for value in values)
            return 1.0

    start_up_gate(Elsewhere(2, 2, device="meta"), recipe, prepared, trainer.sources["train"], quiet)
    assert len(seen) > 5 and set(seen) == {"meta"}


# The overfit gate: what is learned by heart is accepted by the loop.


def test_overfit_drafts_are_accepted_by_the_loop(tmp_path) -> None:
    write_rows(tmp_path / "train.jsonl", prompt_rows(8, seed=3))
    values = settings(
        tmp_path,
        max_tokens_per_batch=2000,
        max_steps=150,
        learning_rate=5e-3,
        loss="cross_entropy",
        warmup_steps=20,
        ttt_steps=4,
        weight_decay=0.0,
        eval_steps=1000,
        save_steps=1000,
        logging_steps=50,
    )
    values["draft"] = {"intermediate_size": 128}
    values["data"] |= {"draft_vocab": None, "regenerate": {"max_new_tokens": 28}}
    del values["data"]["validation"]
    recipe = parse_recipe(values, tmp_path)
    target = make_target(recipe)
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, target, quiet)
    trainer, prepared = make_trainer(recipe, run, target)
    draft = Eagle3Draft.from_pretrained(run.draft).eval().attach(target)
    answers = [[t for t, m in zip(r["input_ids"], r["loss_mask"], strict=True) if m] for r in prepared.rows["train"]]
    assert sum(len(set(answer)) > 8 for answer in answers) >= 4, "the answers are to be more than a loop of few words"
    drafted = accepted = 0
    for row, answer in zip(prepared.rows["train"], answers, strict=True):
        prompt = row["input_ids"][: len(row["input_ids"]) - len(answer)]
        room = len(answer) - 4 if len(answer) == 28 else len(answer)
        done = generate(target, [prompt], draft.proposer(target), k=4, max_new_tokens=room)
        assert done.generations[0].tokens == answer[:room]
        drafted += done.counts.drafted
        accepted += done.counts.accepted
    assert drafted > 100
    assert accepted / drafted >= 0.99
