"""Selection by acceptance as served: the figure is the evaluator's, measuring changes nothing, the best is kept, and a
run without gain ends.
"""

import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from drafttrain.data.run_folder import RunError
from drafttrain.drafts.loading import load_draft, load_served
from drafttrain.evaluate.runner import evaluate
from drafttrain.recipe import RecipeError, TrainingConfig, parse_recipe
from drafttrain.specdec.metrics import Counts
from drafttrain.target import Target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from drafttrain.training.selection import LENGTH, LOSS, Acceptance, gains, undisturbed, waited
from tests.tiny_models import make_model
from tests.training.tiny_run import make_recipe, make_target, make_trainer, open_run, settings, write_target

METHODS = {
    "eagle3": {},
    "medusa": {"draft": {"num_heads": 3, "tree_nodes": 0}},
    "medusa2": {"draft": {"num_heads": 3, "tree_nodes": 0, "lora": {"r": 4}}},
    "kd": {"draft": {"num_hidden_layers": 2}, "data": {"draft_vocab": None}},
    "kd, 60 words": {"draft": {"num_hidden_layers": 2}},
}


def quiet(message: str) -> None:
    pass


def recipe_for(folder, method: str, draft=None, **training):
    if not (folder / "target").exists():
        write_target(folder / "target", num_hidden_layers=4)
    if method == "medusa2":
        training |= {"warmup_heads_steps": 1, "target_learning_rate": 1e-2}
    values = settings(folder, **training)
    if method == "eagle3":
        values["features"]["layers"] = [1, 2, 3]
    else:
        del values["training"]["ttt_steps"]
        values["method"] = "medusa" if method.startswith("medusa") else "kd"
    for section, changes in METHODS[method].items():
        values[section] = values.get(section, {}) | changes
    values["draft"] = values.get("draft", {}) | (draft or {})
    return parse_recipe(values, folder)


def rows_of(log, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in read_log(log) if key in row}


# What is measured.


@pytest.mark.parametrize("method", METHODS)
def test_the_length_is_the_evaluators(tmp_path, method) -> None:
    """The draft that is kept, loaded and evaluated on the same prompts, has the very length in the log."""
    recipe = recipe_for(
        tmp_path,
        method,
        max_steps={"medusa": 40, "medusa2": 24}.get(method, 16),
        learning_rate=2e-2,
        eval_steps=1000,
        acceptance_k=3,
        acceptance_prompts=6,
        acceptance_new_tokens=16,
    )
    run, target = open_run(tmp_path / "run", recipe), make_target(recipe)
    train(recipe, run, target, quiet)
    kept = json.loads((run.draft / "drafttrain.json").read_text())["validation"]
    served = load_served(recipe.target, run.draft)
    assert (served.fingerprint != target.fingerprint) == (method == "medusa2")
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "other", recipe), target)
    draft = load_draft(run.draft, served)
    report = evaluate(
        served, draft, trainer.acceptance.prompts, k=[3], max_new_tokens=16, ngram=False, certificate=False
    )
    assert kept[LENGTH] == pytest.approx(report["runs"][1]["mean_acceptance_length"], abs=1e-6)
    assert kept[LENGTH] > 1 and kept[LENGTH] != pytest.approx(kept["eval_teacher_forced_length"], abs=1e-3)
    assert rows_of(run.log, LENGTH) == {kept["step"]: kept[LENGTH]}


def test_fp32_weights_draft_for_a_target_in_bf16_as_deep_as_they_go(tmp_path) -> None:
    for method in ("eagle3", "medusa", "kd"):
        folder = tmp_path / method
        folder.mkdir()
        values = recipe_for(folder, method).model_dump()
        values["target"]["dtype"] = "bfloat16"
        recipe = parse_recipe(values, folder)
        trainer, _ = make_trainer(recipe, open_run(folder / "run", recipe), make_target(recipe))
        counts = trainer.acceptance.measure(trainer.model)
        assert (
            len(counts.lengths) - 1 == (3 if method == "medusa" else recipe.training.acceptance_k)
            and counts.lengths[-1]
        )


def target_of(positions: int) -> Target:
    return Target.from_model(make_model("Llama", max_position_embeddings=positions))


def rows(*lengths: int, answer: int = 2) -> list[dict]:
    return [{"input_ids": list(range(3, 3 + n + answer)), "loss_mask": [0] * n + [1] * answer} for n in lengths]


def test_prompts_end_where_the_answer_begins_and_leave_room() -> None:
    config = TrainingConfig(acceptance_new_tokens=5, acceptance_prompts=8)
    found = Acceptance(target_of(12), config, [*rows(3, 8, 9), {"input_ids": [5, 6], "loss_mask": [0, 0]}])
    assert found.prompts == [[3, 4, 5], [3, 4, 5, 6, 7, 8, 9, 10]]  # 8 + 5 - 1 = 12 positions; 9 + 5 - 1 are too many.
    with pytest.raises(RunError, match=r"None of 1 validation rows .* within the 12 positions"):
        Acceptance(target_of(12), config, rows(9))


def test_prompts_are_spread_evenly_and_plain_text_is_cut_alike_every_time() -> None:
    config = TrainingConfig(acceptance_new_tokens=5, acceptance_prompts=3, seed=4)
    found = Acceptance(target_of(64), config, rows(*range(2, 9)))
    assert [len(prompt) for prompt in found.prompts] == [2, 4, 6]  # Places 0, 2 and 4 of 7.
    text = [{"input_ids": list(range(3, 23)), "loss_mask": [0] + [1] * 19}] * 6
    once, again = (Acceptance(target_of(64), config, text).prompts for _ in range(2))
    lengths = {len(prompt) for prompt in once}
    assert once == again and 5 <= min(lengths) < max(lengths) <= 15


def test_groups_hold_what_the_token_budget_holds() -> None:
    config = TrainingConfig(acceptance_new_tokens=10, acceptance_prompts=9, max_tokens_per_batch=40)
    acceptance = Acceptance(target_of(64), config, rows(3, 10, 3, 45, 12))
    groups = [[len(prompt) for prompt in group] for group in acceptance._groups(acceptance.prompts)]
    assert groups == [
        [3, 3],
        [10],
        [12],
        [45],
    ]  # 13 x 3 = 39 with 3, 20 x 3 = 60 with 10, 22 x 2 = 44; 55 stands alone.


def test_ranks_share_the_prompts(tmp_path) -> None:
    recipe = make_recipe(tmp_path, acceptance_prompts=5)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    whole = trainer.acceptance.measure(trainer.model)
    shares = [trainer.acceptance.measure(trainer.model, rank, 2) for rank in (0, 1)]
    assert all(0 < share.iterations < whole.iterations for share in shares)
    assert [sum(getattr(s, name) for s in shares) for name in ("iterations", "accepted", "emitted")] == [
        whole.iterations,
        whole.accepted,
        whole.emitted,
    ]


# What it leaves alone.


def drawing(draft):
    """The draft, but its proposer draws from every global random state."""
    original = draft.proposer

    def proposer(target):
        torch.rand(3), random.random(), np.random.rand()
        return original(target)

    draft.proposer = proposer


@pytest.mark.parametrize("method", ["eagle3", "medusa", "kd"])
def test_the_run_is_bit_for_bit_the_one_without_measuring(tmp_path, method) -> None:
    """kd with dropout: its loss hangs on torch's random state and on the mode."""
    curves, weights, places = [], [], []
    for select in ("loss", "acceptance"):
        draft = {"lora": {"r": 4, "dropout": 0.3}} if method == "kd" else {}
        recipe = recipe_for(tmp_path, method, draft, select_by=select, eval_steps=2, max_steps=6)
        run = open_run(tmp_path / select, recipe)
        trainer, _ = make_trainer(recipe, run, make_target(recipe))
        drawing(trainer.model)
        random.seed(5), np.random.seed(5)
        trainer.fit()
        curves.append(rows_of(run.log, "loss"))
        weights.append(load_file(run.checkpoints()[-1] / "model.safetensors"))
        places.append((random.random(), np.random.rand(), float(torch.rand(1))))
        assert bool(rows_of(run.log, LENGTH)) == (select == "acceptance")
    assert len(curves[0]) == 6 and curves[0] == curves[1] and places[0] == places[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_every_modules_mode_is_back_also_after_an_error() -> None:
    draft = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()
    draft[0].eval()
    with undisturbed(draft):
        assert not any(module.training for module in draft.modules())
        draft[1].train()
    assert [module.training for module in draft.modules()] == [True, False, True]
    with pytest.raises(KeyError), undisturbed(draft):
        raise KeyError
    assert [module.training for module in draft.modules()] == [True, False, True]


def test_an_error_while_measuring_ends_the_training(tmp_path) -> None:
    recipe = make_recipe(tmp_path, eval_steps=3, save_steps=2, max_tokens_per_batch=64)
    run = open_run(tmp_path / "run", recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe))
    before = trainer.model.proposer

    def proposer(target):
        if trainer.state.global_step == 6:
            raise RunError("broken while measuring")
        return before(target)

    trainer.model.proposer = proposer
    with pytest.raises(RunError, match="broken while measuring"):
        trainer.fit()
    assert trainer.state.global_step == 6 and trainer.model.training
    assert list(rows_of(run.log, LENGTH)) == [3] and run.checkpoints()[-1].name == "checkpoint-4"


# What is kept, and when it ends.


class Scripted:
    """In the place of an Acceptance: measures what it is told, at every multiple of `every`."""

    def __init__(self, lengths, every: int = 2):
        self.lengths, self.every, self.at = lengths, every, SimpleNamespace(seconds=0.0)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def measure(self, draft, rank: int = 0, world_size: int = 1, ends=None) -> Counts:
        time.sleep(self.at.seconds)
        return Counts(iterations=100, accepted=round(100 * (self.lengths.pop(0) - 1)))


def scripted(folder, name: str, lengths, every: int = 2, **training):
    options = {"eval_steps": 2, "save_steps": 2, "max_steps": 12, "num_train_epochs": 9}
    recipe = make_recipe(folder, **options | training)
    kept = []
    run = open_run(folder / name, recipe)
    trainer, _ = make_trainer(recipe, run, make_target(recipe), lambda draft, facts: kept.append(facts["step"]))
    if trainer.acceptance is not None:
        trainer.acceptance = Scripted(list(lengths), every)
    trainer.fit()
    return trainer, kept


def test_gains_and_waits_by_hand() -> None:
    assert gains(LENGTH, 2.0, 1.9) and not gains(LENGTH, 1.9, 1.9) and gains(LENGTH, 1.0, None)
    assert gains(LOSS, 1.9, 2.0) and not gains(LOSS, 2.0, 2.0)
    assert not gains(LENGTH, float("nan"), None) and not gains(LOSS, float("nan"), 3.0)
    lengths = [1.5, 2.0, 1.9, 2.0, 2.1, 2.0]
    history = [row for x in lengths for row in ({"loss": 1.0}, {LENGTH: x, LOSS: 3 - x})]
    assert [waited(history[: 2 * n], LENGTH) for n in range(7)] == [0, 0, 0, 1, 2, 0, 1]
    assert waited([{LOSS: x} for x in (3.0, 2.0, 2.5, 2.0)], LOSS) == 2


def test_the_longest_is_kept_while_the_loss_still_falls(tmp_path) -> None:
    trainer, kept = scripted(tmp_path, "run", [1.4, 1.9, 1.7, 1.9, 1.95, 1.2])
    assert kept == [2, 4, 10] and trainer.best == pytest.approx(1.95)
    validation = rows_of(trainer.run.log, LOSS)
    assert min(validation, key=validation.get) == 12
    by_loss, kept = scripted(tmp_path, "loss", [], select_by="loss", learning_rate=0.05, lr_scheduler_type="constant")
    losses = rows_of(by_loss.run.log, LOSS)
    assert by_loss.criterion == LOSS and not rows_of(by_loss.run.log, LENGTH)
    best = [step for step in losses if all(losses[step] < losses[other] for other in losses if other < step)]
    assert kept == best and len(best) < len(losses) and by_loss.best == min(losses.values())


def test_it_is_measured_every_so_many_steps_and_at_the_end(tmp_path) -> None:
    trainer, _ = scripted(tmp_path, "run", [1.5, 1.4, 1.3], every=4, max_steps=10)
    assert rows_of(trainer.run.log, LENGTH) == pytest.approx({4: 1.5, 8: 1.4, 10: 1.3})
    assert list(rows_of(trainer.run.log, LOSS)) == [2, 4, 6, 8, 10]
    assert trainer.evaluated()
    for config, steps in ({"eval_steps": 2, "acceptance_steps": 6}, [6, 12]), ({"eval_steps": 4}, [4, 8, 12]):
        acceptance = Acceptance(target_of(99), TrainingConfig(**config), rows(3))
        assert [step for step in range(1, 13) if acceptance.due(step)] == steps


def test_two_measurements_without_gain_end_the_run_also_across_a_resume(tmp_path) -> None:
    straight, kept = scripted(tmp_path, "straight", [1.5, 1.8, 1.7, 1.8, 1.9], early_stopping_patience=2)
    assert (straight.state.global_step, kept) == (8, [2, 4])

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                raise InterruptedError

    recipe = make_recipe(
        tmp_path, eval_steps=2, save_steps=2, max_steps=12, num_train_epochs=9, early_stopping_patience=2
    )
    for lengths, callbacks in (([1.5, 1.8, 1.7], [Stop()]), ([1.8, 1.9], []), ([2.5], [])):
        trainer, _ = make_trainer(recipe, open_run(tmp_path / "broken", recipe), make_target(recipe))
        trainer.acceptance = Scripted(lengths)
        for callback in callbacks:
            trainer.add_callback(callback)
        if callbacks:
            with pytest.raises(InterruptedError):
                trainer.fit()
        else:
            trainer.fit()
            assert trainer.state.global_step == 8  # The third time nothing is left to do.
    assert trainer.acceptance.lengths == [2.5]


def test_tokens_per_second_are_of_training_alone(tmp_path) -> None:
    recipe = make_recipe(tmp_path, eval_steps=1, max_steps=4, max_tokens_per_batch=64)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    trainer.acceptance = Scripted([1.5] * 4, every=1)
    trainer.acceptance.at.seconds = 0.5
    trainer.fit()
    rates = list(rows_of(trainer.run.log, "tokens_per_second").values())
    assert min(rates[1:]) > 64 / 0.5 and trainer.budget.seconds() > 1.5
    assert all(seconds >= 0.5 for seconds in rows_of(trainer.run.log, "eval_acceptance_seconds").values())


# Recipes.


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"select_by": "loss", "acceptance_prompts": 4}, "training.acceptance_prompts"),
        ({"select_by": "loss", "acceptance_steps": 1000}, "training.acceptance_steps"),
        ({"acceptance_steps": 700}, "training.acceptance_steps"),
        ({"acceptance_k": 5}, "training.acceptance_k"),
        ({"select_by": "accept"}, "training.select_by"),
        ({"acceptance_new_tokens": 1}, "training.acceptance_new_tokens"),
        ({"early_stopping_patience": 0}, "training.early_stopping_patience"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(training, key) -> None:
    data = {"train": [{"path": "a.jsonl"}], "validation": [{"path": "b.jsonl"}]}
    with pytest.raises(RecipeError, match=key):
        parse_recipe({"method": "medusa", "target": "x/y", "data": data, "training": training})


@pytest.mark.parametrize("name", ["select_by", "early_stopping_patience"])
def test_selection_needs_validation_data(name) -> None:
    settings = {"method": "kd", "target": "x/y", "data": {"train": [{"path": "a.jsonl"}]}}
    values = {"select_by": "loss", "early_stopping_patience": 3}
    with pytest.raises(RecipeError, match=rf"training\.{name}: drafts are measured on data\.validation"):
        parse_recipe({**settings, "training": {name: values[name]}})
    assert Acceptance.of(parse_recipe(settings).training, target_of(64), {"train": rows(3)}) is None
