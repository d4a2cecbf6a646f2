"""Medusa heads through the one trainer: sources agree, a resume is exact, what is written drafts as it was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data.batching import collate
from drafttrain.data.prepare import prepare
from drafttrain.data.sources import needs_statistics
from drafttrain.drafts.base import Batch, DraftError, supervised_rows
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.recipe import RecipeError, parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from tests.tiny_drafts import plain
from tests.training.tiny_run import make_target, make_trainer, open_run, settings, write_target

HEADS = 3
OWN = {"own_heads": True}
SEQUENTIAL = {"sequential": True, "num_hidden_layers": 2}
WHOLE = {"draft_vocab": None}


def quiet(message: str) -> None:
    pass


def recipe_for(folder, draft=None, features=None, data=None, **training):
    values = settings(folder, **training)
    del values["training"]["ttt_steps"]
    values["method"] = "medusa"
    values["draft"] = {"num_heads": HEADS} | (draft or {})
    values["features"] |= features or {}
    values["data"] |= data or {}
    return parse_recipe(values, folder)


def trained(folder, name: str, **changes):
    recipe = recipe_for(folder, **changes)
    run = open_run(folder / name, recipe)
    train(recipe, run, make_target(recipe), say=quiet)
    return run


def losses(run) -> list[float]:
    return [row["loss"] for row in read_log(run.log) if "loss" in row]


@pytest.mark.parametrize(
    ("draft", "data"), [({}, {}), ({}, WHOLE), (OWN, WHOLE), (SEQUENTIAL, {})], ids=["reduced", "whole", "own", "seq"]
)
def test_the_loss_falls_and_what_is_written_drafts(tmp_path, draft, data) -> None:
    run = trained(tmp_path, "run", draft=draft, data=data, max_steps=24, learning_rate=2e-2)
    assert losses(run)[-1] < 0.9 * losses(run)[0]
    target = make_target(recipe_for(tmp_path))
    found = load_draft(run.path, target)
    assert isinstance(found, MedusaDraft)
    assert found.steps == HEADS
    assert found.whole_vocabulary == bool(data)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13]]
    master = load_draft(run.draft / "master", target)
    decoded = [
        generate(target, prompts, one.proposer(target), k=HEADS, max_new_tokens=20, stop_ids=())
        for one in (found, master)
    ]
    assert [g.tokens for g in decoded[0].generations] == plain(target, prompts, 20)
    assert decoded[0].counts == decoded[1].counts
    assert not master.input_rms.eq(1).any()
    assert found.input_rms.eq(1).all()
    facts = json.loads((run.draft / "drafttrain.json").read_text())
    assert facts["method"] == "medusa"
    assert facts["validation"]["eval_acceptance_length"] >= 1
    untrained = load_draft(run.path / "untrained", target)
    assert all(tensor.eq(0).all() for tensor in untrained.blocks.state_dict().values())


@pytest.mark.parametrize(
    ("draft", "data"), [({}, {}), ({}, WHOLE), (OWN, WHOLE), (SEQUENTIAL, {})], ids=["reduced", "whole", "own", "seq"]
)
def test_online_and_stored_features_give_the_same_trajectory(tmp_path, draft, data) -> None:
    changes = {"draft": draft, "data": data, "max_steps": 6}
    online = trained(tmp_path, "online", **changes)
    stored = trained(tmp_path, "stored", features={"source": "store"}, **changes)
    assert losses(online) == pytest.approx(losses(stored), abs=1e-5)


def test_top_k_teachers_and_own_heads_of_a_smaller_vocabulary_are_refused(tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"draft\.own_heads"):
        recipe_for(tmp_path, draft=OWN)
    with pytest.raises(RecipeError, match=r"features\.source: found 'topk'"):
        recipe_for(tmp_path, features={"source": "topk"})


@pytest.mark.parametrize("draft", [{}, OWN, SEQUENTIAL], ids=["shared", "own", "seq"])
def test_six_steps_are_three_and_a_resume_and_three(tmp_path, draft) -> None:
    # A constant learning rate: it does not depend on the planned length.
    steps = {"max_steps": 6, "save_steps": 3, "eval_steps": 100, "lr_scheduler_type": "constant"}
    changes = {"draft": draft, "data": WHOLE if draft is OWN else {}, **steps}
    whole = trained(tmp_path, "whole", **changes)
    trained(tmp_path, "parts", **{**changes, "max_steps": 3})
    parts = trained(tmp_path, "parts", **changes)
    first, second = (load_file(run.checkpoints()[-1] / "model.safetensors") for run in (whole, parts))
    assert first.keys() == second.keys()
    assert "input_rms" in first
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_checkpoint_holds_the_heads_and_nothing_of_the_target(tmp_path) -> None:
    run = trained(tmp_path, "run", max_steps=4)
    names = load_file(run.checkpoints()[-1] / "model.safetensors").keys()
    blocks = {f"blocks.{i}.layers.0.{leaf}" for i in range(HEADS) for leaf in ("weight", "bias")}
    assert names == blocks | {"input_rms", "draft_ids"}


def test_step_acceptance_is_each_heads_own_accuracy(tmp_path) -> None:
    """step_acceptance/k of the log, counted by hand: head k right at p about the target's choice at p+1+k, whatever the
    heads before it said. eval_teacher_forced_length is from the joint counts."""
    recipe = recipe_for(tmp_path, max_tokens_per_batch=2000, max_steps=1, eval_steps=1, learning_rate=1e-12)
    target = make_target(recipe)
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), target)
    draft = trainer.model
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)

    def count(split):
        batch = Batch(**collate(prepared.rows[split]))
        chosen = target.model(batch.input_ids).logits.argmax(-1)
        normed = target.model(batch.input_ids, output_hidden_states=True).hidden_states[-1]
        with torch.no_grad():
            said = [draft.draft_ids[draft.logits(k, draft.state(k, normed, None)).argmax(-1)] for k in range(HEADS)]
        valid = supervised_rows(batch.loss_mask.bool(), HEADS)
        rows = [valid[k].nonzero().tolist() for k in range(HEADS)]
        hit = [{(b, p): bool(said[k][b, p] == chosen[b, p + 1 + k]) for b, p in rows[k]} for k in range(HEADS)]
        own = [sum(h.values()) / len(h) for h in hit]
        joint = [sum(all(hit[j][place] for j in range(k + 1)) for place in hit[k]) / len(hit[k]) for k in range(HEADS)]
        return own, joint

    expected, (own, joint) = count("train")[0], count("validation")
    trainer.fit()
    log = read_log(trainer.run.log)
    row = next(row for row in log if "loss" in row)
    assert [row[f"step_acceptance/{k}"] for k in range(HEADS)] == pytest.approx(expected)
    assert any(expected)
    found = next(row for row in log if "eval_loss" in row)
    assert [found[f"eval_step_acceptance/{k}"] for k in range(HEADS)] == pytest.approx(own)
    assert found["eval_teacher_forced_length"] == pytest.approx(1 + sum(joint))


def test_heads_are_weighted_by_the_decay(tmp_path) -> None:
    recipe = recipe_for(tmp_path, max_tokens_per_batch=2000, max_steps=1, step_decay=0.5)
    target = make_target(recipe)
    trainer, prepared = make_trainer(recipe, open_run(tmp_path / "run", recipe), target)
    batch = trainer.sources["train"].attach(Batch(**collate(prepared.rows["train"])))
    figures = trainer.model(batch).figures
    trainer.fit()
    first = next(row for row in read_log(trainer.run.log) if "loss" in row)
    expected = sum(0.5**k * float(figures.loss[k]) for k in range(HEADS)) / float(figures.rows[0])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


def test_no_features_but_the_last_hidden_state_are_kept(tmp_path) -> None:
    """A whole vocabulary finds its log-sum-exp in its own loss; a smaller one needs the target's."""
    for vocabulary in (None, 60):
        recipe = recipe_for(tmp_path, data={"draft_vocab": vocabulary})
        target = make_target(recipe)
        prepared = prepare(recipe, open_run(tmp_path / f"run{vocabulary}", recipe), target, quiet)
        assert prepared.layers == []
        assert needs_statistics(recipe) == (vocabulary is not None)
        batch = prepared.source(recipe, target, "train").attach(Batch(**collate(prepared.rows["train"][:2])))
        assert batch.features is None or batch.features.shape[-1] == 0
        assert batch.last_hidden.shape[-1] == target.hidden_size
        assert (batch.target_lse is not None) == (vocabulary is not None)


def test_more_heads_than_the_longest_answer_still_train(tmp_path) -> None:
    run = trained(tmp_path, "run", draft={"num_heads": 16}, max_steps=3)
    assert all(loss == loss for loss in losses(run))
    assert load_draft(run.path, make_target(recipe_for(tmp_path))).max_k == 16


def test_a_run_of_another_target_is_refused(tmp_path) -> None:
    run = trained(tmp_path, "run", max_steps=1)
    other = tmp_path / "other"
    other.mkdir()
    write_target(other / "target", hidden_size=16)
    with pytest.raises(DraftError, match="hidden size 16"):
        load_draft(run.path, make_target(recipe_for(other)))
