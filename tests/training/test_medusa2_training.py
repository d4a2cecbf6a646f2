"""Medusa-2 through the one trainer: learning rates, warm-up of the heads, resume, drift in logs and files, evaluation
against the tuned target.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from drafttrain import cli_common
from drafttrain.data.prepare import prepared_rows
from drafttrain.drafts.base import DraftError, ParameterGroup
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.run import evaluate_draft
from drafttrain.recipe import RecipeError, parse_recipe
from drafttrain.target import load_target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from drafttrain.training.trainer import FIRST_STEP, split_off
from tests.training.tiny_run import make_target, make_trainer, open_run, settings, write_target


def quiet(message: str) -> None:
    pass


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedError


def recipe_for(folder, data=None, draft=None, **training):
    if not (folder / "target").exists():
        write_target(folder / "target", num_hidden_layers=2)
    values = settings(folder, **{"warmup_heads_steps": 2, "target_learning_rate": 1e-3} | training)
    del values["training"]["ttt_steps"], values["data"]["draft_vocab"]
    values["method"] = "medusa"
    values["draft"] = {"num_heads": 2, "tree_nodes": 0, "lora": {"r": 4}} | (draft or {})
    values["data"] |= {"draft_vocab": None} | (data or {})
    return parse_recipe(values, folder)


def adapters(folder) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


def logged(run, key: str) -> list[float]:
    return [row[key] for row in read_log(run.log) if key in row]


def test_split_off_keeps_weight_decay_and_order() -> None:
    a, b, c, d = (torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
    optimizer = torch.optim.AdamW([{"params": [a, b], "weight_decay": 0.5}, {"params": [c, d]}], lr=0.8)
    split_off(optimizer, ParameterGroup([d, b], 0.25, 3))
    found = [(g["params"], g["weight_decay"], g["lr"], g.get(FIRST_STEP, 0)) for g in optimizer.param_groups]
    assert found == [([a], 0.5, 0.8, 0), ([c], 0.01, 0.8, 0), ([b], 0.5, 0.2, 3), ([d], 0.01, 0.2, 3)]


def test_each_group_has_its_rate_and_its_warm_up(tmp_path) -> None:
    recipe = recipe_for(tmp_path, max_steps=8, warmup_steps=2, lr_scheduler_type="constant", warmup_heads_steps=3)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    trainer.budget.start()
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(8)
    own = {id(p) for p in trainer.model.adapters().values()}
    groups = [group for group in optimizer.param_groups if group["params"]]
    tuned = [{id(p) for p in group["params"]} <= own for group in groups]
    assert tuned == sorted(tuned) and sum(len(g["params"]) for g, t in zip(groups, tuned, strict=True) if t) == len(own)
    rates = []
    for _ in range(6):
        rates.append({group["lr"] for group, t in zip(groups, tuned, strict=True) if not t})
        rates[-1] = (*rates[-1], *{group["lr"] for group, t in zip(groups, tuned, strict=True) if t})
        optimizer.step()
        scheduler.step()
    expected = [(1.5e-3, 0), (3e-3, 0), (3e-3, 0), (3e-3, 5e-4), (3e-3, 1e-3), (3e-3, 1e-3)]
    assert rates == [pytest.approx(pair) for pair in expected]


def test_the_heads_alone_learn_at_first(tmp_path) -> None:
    recipe = recipe_for(tmp_path, max_steps=4, save_steps=2, eval_steps=2)
    run = open_run(tmp_path / "run", recipe)
    target = make_target(recipe)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    trainer, _ = make_trainer(recipe, run, target)
    start = {f"model.{name}": p.detach().clone() for name, p in trainer.model.adapters().items()}
    blocks = [p.detach().clone() for p in trainer.model.heads.parameters()]
    trainer.fit()
    second, last = adapters(run.path / "checkpoint-2"), adapters(run.path / "checkpoint-4")
    assert second.keys() == start.keys() and all(torch.equal(second[name], start[name]) for name in start)
    assert not any(torch.equal(last[name], start[name]) for name in start)
    assert not any(map(torch.equal, blocks, trainer.model.heads.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())
    drift, same = logged(run, "target_drift"), logged(run, "target_same_choice")
    # A figure is taken in front of its update: the third step still sees the target as it was.
    assert drift[:3] == pytest.approx([0, 0, 0], abs=1e-5) and same[:3] == [1, 1, 1] and drift[3] > 1e-5
    first, second = logged(run, "eval_target_drift")
    assert first == pytest.approx(0, abs=1e-5) and second > 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_six_steps_are_three_and_a_resume_and_three(tmp_path, dropout) -> None:
    draft = {"lora": {"r": 4, "dropout": dropout}}
    recipe = recipe_for(tmp_path, draft=draft, max_tokens_per_batch=96, max_steps=6, save_steps=3, eval_steps=3)

    def fit(name, callbacks=()):
        trainer, _ = make_trainer(recipe, open_run(tmp_path / name, recipe), make_target(recipe))
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.fit()
        return trainer.state.global_step

    fit("straight")
    with pytest.raises(InterruptedError):
        fit("broken", [StopAt(5)])
    assert fit("broken") == 6
    for name in ("checkpoint-3", "checkpoint-6"):
        a, b = (load_file(tmp_path / run / name / "model.safetensors") for run in ("straight", "broken"))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        a, b = (torch.load(tmp_path / run / name / "optimizer.pt") for run in ("straight", "broken"))
        assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
        for index, moments in a["state"].items():
            assert all(torch.equal(value, b["state"][index][key]) for key, value in moments.items())
    assert all(bool(tensor.any()) for tensor in adapters(tmp_path / "broken" / "checkpoint-6").values())


@pytest.fixture(scope="module", params=[None, 60])
def trained(request, tmp_path_factory):
    """(recipe, run, what was said) of a whole run, with the whole vocabulary and with a smaller one."""
    folder = tmp_path_factory.mktemp("trained")
    draft = {"tree_nodes": 0 if request.param else 4}
    recipe = recipe_for(folder, {"draft_vocab": request.param}, draft, num_train_epochs=3)
    run, said = open_run(folder / "run", recipe), []
    train(recipe, run, make_target(recipe), say=said.append)
    return recipe, run, said


def test_a_run_leaves_heads_and_their_target_and_says_so(trained) -> None:
    recipe, run, said = trained
    facts = json.loads((run.draft / "drafttrain.json").read_text())
    validation = facts["validation"]
    assert validation["eval_target_drift"] > 0 and 0 < validation["eval_target_same_choice"] <= 1
    unchanged = make_target(recipe)
    assert facts["tuned_from"] == {"name": "target", "fingerprint": unchanged.fingerprint}
    expected = f"served with {run.draft / 'target'} (target, tuned with it; on validation data "
    expected += f"{validation['eval_target_drift']:.4f} nats"
    assert expected in said[-1]
    assert not (run.untrained / "target").exists()
    assert logged(run, "eval_step_alpha/0")[-1] > logged(run, "eval_step_alpha/0")[0]


def test_the_figures_of_the_best_are_those_of_its_files(trained) -> None:
    """Acceptance on the written tuned target, and its drift, from ordinary forwards over the validation rows."""
    recipe, run, _ = trained
    unchanged, tuned = make_target(recipe), load_target(str(run.draft / "target"), dtype="float32")
    draft = load_draft(run.draft, tuned)
    validation = json.loads((run.draft / "drafttrain.json").read_text())["validation"]
    divergence, same, asked, hits, rows = 0.0, 0, 0, 0, 0
    ids = draft.draft_ids
    with torch.no_grad():
        for row in prepared_rows(run, "validation"):
            x = torch.tensor([row["input_ids"]])
            p, q = (t.model(input_ids=x).logits[0, :-1].double().log_softmax(-1) for t in (unchanged, tuned))
            divergence += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            asked += len(p)
            normed = tuned.decoder(input_ids=x).last_hidden_state[0]
            choice = ids[draft.logits(0, draft.state(0, normed[:-2], None)).argmax(-1)]
            hits += int((choice == q[1:].argmax(-1)).sum())
            rows += len(choice)
    assert validation["eval_target_drift"] == pytest.approx(divergence / asked, rel=1e-3, abs=1e-6)
    assert validation["eval_target_same_choice"] == pytest.approx(same / asked)
    assert validation["eval_step_acceptance/0"] == pytest.approx(hits / rows)


def test_a_run_is_evaluated_with_the_target_tuned_for_it(trained, capsys) -> None:
    recipe, run, _ = trained
    found_run, found_recipe, target = cli_common.open_source(str(run.path), None)
    told = capsys.readouterr()
    assert "the draft is served with" in told.err and "tuned with it; on validation data" in told.err and not told.out
    assert found_recipe.method == "medusa" and target.folder == run.draft / "target" and target.dtype == torch.float32
    rows = cli_common.training_rows(recipe, found_run, target, pytest.fail)
    assert len(rows) == 24
    report = evaluate_draft(run.path, target, recipe.evaluation, recipe=recipe, training_rows=rows, say=quiet)
    facts = report["target"]
    assert facts["fingerprint"] == target.fingerprint and facts["tuned_from"] == "target"
    assert facts["drift"] > 0 and facts["name"].endswith("tuned with its Medusa heads")
    drafts = {entry["draft"] for entry in report["runs"]}
    assert {"medusa", "ngram", "none"} <= drafts and {entry["trained"] for entry in report["runs"]} == {True, False}
    assert all(entry["identical_to_plain"] for entry in report["runs"] if entry["draft"] != "none")
    with pytest.raises(DraftError, match="trained together with a tuned"):
        evaluate_draft(run.path, make_target(recipe), recipe.evaluation, recipe=recipe, say=quiet)


def test_without_a_moved_adapter_the_recipes_target_serves(tmp_path, capsys) -> None:
    recipe = recipe_for(tmp_path, warmup_heads_steps=100, num_train_epochs=1)
    run = open_run(tmp_path / "run", recipe)
    said = []
    train(recipe, run, make_target(recipe), say=said.append)
    assert "served with" not in said[-1] and set(logged(run, "eval_target_same_choice")) == {1}
    capsys.readouterr()
    _, _, target = cli_common.open_source(str(run.path), None)
    assert target.name == recipe.target.name_or_path and "served with" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"draft": {"lora": None}, "anchor": 2.0, "warmup_heads_steps": 100, "target_learning_rate": None}, "anchor"),
        ({"draft": {"lora": None}, "target_learning_rate": None}, "training.warmup_heads_steps: is for Medusa heads"),
        ({"draft": {"lora": None}, "warmup_heads_steps": 100}, "training.target_learning_rate: is for Medusa heads"),
        ({"max_steps": 2}, "found 2 of training.max_steps 2"),
        ({"anchor": -1.0}, "anchor"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(tmp_path, changes, key) -> None:
    with pytest.raises(RecipeError, match=key):
        recipe_for(tmp_path, **changes)


def test_adapters_on_the_target_are_for_medusa(tmp_path) -> None:
    values = settings(tmp_path)
    values["draft"] = {"lora": {"r": 2}}
    with pytest.raises(RecipeError, match=r"draft.lora: found .* this is eagle3"):
        parse_recipe(values, tmp_path)
