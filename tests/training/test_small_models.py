"""Distilling small models through the one trainer: sources agree, a resume is exact, on-policy batches are counted."""

import json
import shutil
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.data.conversations import DataError
from drafttrain.data.features import OnlineFeatures
from drafttrain.data.prepare import load_prepared, prepare
from drafttrain.data.teacher_cache import TopKFeatures
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.loading import load_draft
from drafttrain.recipe import parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.target import load_target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from tests.tiny_models import make_model, make_tokenizer, save
from tests.training.tiny_run import make_target, make_trainer, open_run, settings, write_target


def quiet(message: str) -> None:
    pass


def recipe_for(folder, draft=None, features=None, data=None, **training):
    values = settings(folder, **training)
    del values["training"]["ttt_steps"], values["data"]["draft_vocab"]
    values["method"] = "kd"
    values["draft"] = draft or {"num_hidden_layers": 3}
    values["features"] |= features or {}
    values["data"] |= data or {}
    return parse_recipe(values, folder)


def trained(folder, name: str, target=None, **changes):
    recipe = recipe_for(folder, **changes)
    run = open_run(folder / name, recipe)
    train(recipe, run, target or make_target(recipe), say=quiet)
    return run


def losses(run) -> list[float]:
    return [row["loss"] for row in read_log(run.log) if "loss" in row]


def weights(run) -> dict[str, torch.Tensor]:
    return load_file(run.draft / "master" / "model.safetensors")


@pytest.mark.parametrize("vocabulary", [None, 60])
def test_online_and_stored_teachers_give_the_same_trajectory(tmp_path, vocabulary) -> None:
    data = {"draft_vocab": vocabulary}
    online = trained(tmp_path, "online", data=data)
    stored = trained(tmp_path, "stored", data=data, features={"source": "store"})
    assert losses(online) == pytest.approx(losses(stored), abs=1e-5)
    assert losses(online)[-1] < losses(online)[0]


def test_a_cache_of_all_words_is_the_teacher_itself(tmp_path) -> None:
    online = trained(tmp_path, "online")
    cached = trained(tmp_path, "cached", features={"source": "topk", "top_k": 99})
    assert losses(online) == pytest.approx(losses(cached), abs=1e-4)
    rough = trained(tmp_path, "rough", features={"source": "topk", "top_k": 4})
    assert losses(rough)[0] < losses(online)[0]  # Merging the tail into one word can only lower a divergence.


def test_a_cache_from_another_target_is_refused(tmp_path) -> None:
    recipe = recipe_for(tmp_path, features={"source": "topk", "top_k": 4})
    run = open_run(tmp_path / "run", recipe)
    prepared = prepare(recipe, run, make_target(recipe), quiet)
    other = load_target(str(write_target(tmp_path / "other", rope_theta=5000.0)), dtype="float32")
    with pytest.raises(DataError, match="target_fingerprint"):
        prepared.source(recipe, other, "train")


@pytest.mark.parametrize(
    "changes", [{}, {"draft": {"num_hidden_layers": 3, "lora": {"r": 2}}}, {"on_policy": {"share": 0.5}}]
)
def test_six_steps_are_three_and_a_resume_and_three(tmp_path, changes) -> None:
    # A constant learning rate: it does not depend on the planned length.
    steps = {"max_steps": 6, "save_steps": 3, "eval_steps": 100, "lr_scheduler_type": "constant", **changes}
    whole = trained(tmp_path, "whole", **steps)
    trained(tmp_path, "parts", **{**steps, "max_steps": 3})
    parts = trained(tmp_path, "parts", **steps)
    first, second = (load_file(run.checkpoints()[-1] / "model.safetensors") for run in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_checkpoint_holds_what_trains_and_not_the_targets_tables(tmp_path) -> None:
    run = trained(tmp_path, "run", max_steps=4)
    names = load_file(run.checkpoints()[-1] / "model.safetensors").keys()
    assert names
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize(
    "draft",
    [
        {"num_hidden_layers": 3, "choose_layers": "even"},
        {"keep_layers": [0, 2, 7]},
        {"num_hidden_layers": 3, "lora": {"r": 4, "target_modules": ["q_proj", "up_proj"]}},
        {"student": "fresh", "hidden_size": 16, "num_hidden_layers": 2},
    ],
    ids=["even", "named", "lora", "fresh"],
)
def test_each_student_trains_and_its_written_model_drafts(tmp_path, draft) -> None:
    run = trained(tmp_path, "run", draft=draft, max_steps=8, learning_rate=1e-2)
    assert losses(run)[-1] < losses(run)[0]
    target = make_target(recipe_for(tmp_path, draft=draft))
    found = load_draft(run.path, target)
    decoded = generate(target, [[5, 6, 7]], found.proposer(target), k=3, max_new_tokens=12, stop_ids=())
    plain = generate(target, [[5, 6, 7]], max_new_tokens=12, stop_ids=())
    assert decoded.generations[0].tokens == plain.generations[0].tokens
    facts = json.loads((run.draft / "drafttrain.json").read_text())
    assert facts["method"] == "kd"
    assert facts["validation"]["eval_acceptance_length"] >= 1


def test_a_sibling_is_trained_and_one_of_another_tokenizer_refused(tmp_path) -> None:
    recipe_for(tmp_path)
    sibling = write_target(tmp_path / "sibling", num_hidden_layers=2)
    run = trained(tmp_path, "run", draft={"init_from": str(sibling)}, max_steps=4)
    assert any("embed_tokens" in name for name in weights(run))
    recipe = recipe_for(tmp_path, draft={"init_from": str(sibling)}, max_steps=4)
    target = make_target(recipe)
    shutil.rmtree(sibling)  # What was prepared and trained needs it no more.
    assert load_prepared(recipe, run, target).rows["train"]
    words = make_tokenizer(specials=("<pad>", "<eos>", "<bos>", "<|im_end|>"))
    other = save(tmp_path / "stranger", make_model("Llama", num_hidden_layers=2), words)
    with pytest.raises(DraftError, match="another tokenizer"):
        trained(tmp_path, "refused", draft={"init_from": str(other)}, max_steps=4)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"num_hidden_layers": 9}, "keeps 9 layers"),
        ({"num_hidden_layers": 1}, "first and the last"),
        ({"keep_layers": [1, 2]}, "first and the"),
        ({"num_hidden_layers": 3, "lora": {"target_modules": ["query"]}}, "query"),
        ({"student": "fresh", "hidden_size": 64}, "hidden_size is 64"),
    ],
)
def test_students_that_cannot_be_are_refused(tmp_path, draft, message) -> None:
    with pytest.raises(DraftError, match=message):
        trained(tmp_path, "run", draft=draft)


def test_on_policy_batches_come_in_and_the_rows_are_counted_anew(tmp_path) -> None:
    run = trained(tmp_path, "own", on_policy={"share": 1.0, "max_new_tokens": 8}, max_steps=6)
    plain = trained(tmp_path, "plain", max_steps=6)
    assert losses(run)[0] != pytest.approx(losses(plain)[0], abs=1e-4)
    late = trained(tmp_path, "late", on_policy={"share": 1.0, "start": 0.5, "max_new_tokens": 8}, max_steps=6)
    assert losses(late)[:3] == pytest.approx(losses(plain)[:3], abs=1e-6)
    assert losses(late)[3:] != pytest.approx(losses(plain)[3:], abs=1e-4)


def test_mixed_losses_are_the_weighted_sum(tmp_path) -> None:
    first = {name: losses(trained(tmp_path, name, loss=name, max_steps=1))[0] for name in ("forward_kl", "next_token")}
    mixed = losses(trained(tmp_path, "mixed", loss={"forward_kl": 0.7, "next_token": 0.3}, max_steps=1))[0]
    assert mixed == pytest.approx(0.7 * first["forward_kl"] + 0.3 * first["next_token"], rel=1e-4)


@pytest.mark.parametrize("features", [{"source": "store"}, {"source": "topk", "top_k": 99}], ids=["store", "topk"])
def test_what_the_draft_wrote_is_scored_by_the_target_itself(tmp_path, features) -> None:
    """Stored teachers know nothing of it; with the same draws the trajectory is that of an online teacher."""
    options = {"on_policy": {"share": 1.0, "max_new_tokens": 8}, "max_steps": 4}
    online = trained(tmp_path, "online", **options)
    stored = trained(tmp_path, "stored", features=features, **options)
    assert losses(online) == pytest.approx(losses(stored), abs=1e-4)


def test_the_steps_and_the_progress_are_told_to_the_draws(tmp_path) -> None:
    class Recorder:
        calls: ClassVar[list] = []

        def replace(self, inputs, draft, progress, step, rank, world_size):
            self.calls.append((step, rank, world_size, progress))
            return inputs

    recipe = recipe_for(tmp_path, max_steps=4)
    trainer, _ = make_trainer(recipe, open_run(tmp_path / "run", recipe), make_target(recipe))
    trainer.own = Recorder()
    trainer.fit()
    assert Recorder.calls == [(step, 0, 1, step / 4) for step in range(4)]


def test_validation_asks_the_target_where_training_has_its_likeliest_words(tmp_path) -> None:
    recipe = recipe_for(tmp_path, features={"source": "topk", "top_k": 4})
    target = make_target(recipe)
    prepared = prepare(recipe, open_run(tmp_path / "run", recipe), target, quiet)
    assert isinstance(prepared.source(recipe, target, "train"), TopKFeatures)
    assert isinstance(prepared.source(recipe, target, "validation"), OnlineFeatures)
    assert not (prepared.folder / "features" / "validation").exists()
