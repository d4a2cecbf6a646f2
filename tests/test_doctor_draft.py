"""Faults planted in what a draft reads, in its positions, and between training and serving: each is named."""

import shutil

import pytest
import torch
from torch import nn

from drafttrain.data import features
from drafttrain.data.batching import collate
from drafttrain.data.prepare import prepared_rows
from drafttrain.doctor_words import with_norm
from drafttrain.drafts.base import Batch
from drafttrain.drafts.eagle3_proposer import Eagle3Proposer
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.medusa_proposer import MedusaProposer
from drafttrain.drafts.small_model import SmallModelProposer
from drafttrain.export.folder import save_draft
from drafttrain.nn.objective import Objective
from drafttrain.recipe import parse_recipe
from drafttrain.training.run import train as fit
from tests.tiny_doctor import chat_recipe, copied, edit, examine, fails, healthy, quiet, retensor
from tests.tiny_drafts import train
from tests.training.tiny_run import make_target, open_run

SHARD = "features/train/shard-00000.safetensors"
LAYERS = [2, 4, 5]
WIDTH = 32


def exported(run):
    """An export of the run as it was written."""
    folder = run.path / "export" / "vllm"
    shutil.copytree(run.draft, folder, ignore=shutil.ignore_patterns("master"))
    return folder


# layers


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_are_named_and_the_right_ones_measured(tmp_path, shift):
    run = copied(tmp_path)
    moved = [k + shift for k in LAYERS]
    edit(run.draft / "config.json", eagle_aux_hidden_state_layer_ids=moved, eagle_config=None)
    result = fails(examine(run, "layers"), f"declares layers {moved}", f"trained on {LAYERS}")
    assert f"off by one: layers {LAYERS} fit better than the declared {moved}" in result.evidence
    assert f"write eagle_aux_hidden_state_layer_ids {LAYERS}" in result.mend


def test_an_export_with_other_layers_is_named(tmp_path):
    run = copied(tmp_path)
    folder = exported(run)
    edit(folder / "config.json", eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    fails(examine(run, "layers"), "export/vllm declares layers [1, 3, 4], the draft reads [2, 4, 5]")
    edit(folder / "config.json", eagle_aux_hidden_state_layer_ids=LAYERS)
    edit(folder / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS})
    fails(examine(run, "layers"), "the nested ids are [2, 4, 5]", "[1, 3, 4]")


def test_stored_features_of_another_layer_are_named(tmp_path):
    run = copied(tmp_path)
    states, length = states_of(run)

    def shift(tensors):
        tensors["features"][:length, :WIDTH] = states[3][0]

    retensor(run.prepared / SHARD, shift)
    fails(examine(run, "layers"), "the stored features of layer 2 are hs[3]")


def states_of(run):
    """All hs[k] of the first training row, and its length."""
    ids = torch.tensor([prepared_rows(run, "train")[0]["input_ids"]])
    target = make_target(run.recipe())
    return target.hidden_states(ids, None, range(9)), ids.shape[1]


# norm


def test_stored_states_behind_the_final_norm_are_named(tmp_path):
    run = copied(tmp_path)
    states, length = states_of(run)
    target = make_target(run.recipe())

    def norm(tensors):
        tensors["last_hidden"][:length] = target.head().normed(states[8][0])

    retensor(run.prepared / SHARD, norm)
    fails(examine(run, "norm"), "behind the final norm, which the head applies again")


def test_heads_trained_before_the_norm_are_named(tmp_path):
    """The same heads, trained a little longer on un-normed states."""
    run = copied(tmp_path, "medusa")
    recipe = run.recipe()
    target = make_target(recipe)
    draft = load_draft(run.path, target).requires_grad_(True)
    batch = features.OnlineFeatures(target, [], torch.float32).attach(Batch(**collate(prepared_rows(run, "train"))))
    draft.objective = Objective.of("cross_entropy")
    draft.input_rms = batch.last_hidden[batch.loss_mask].square().mean(0).sqrt()
    train(with_norm(draft, nn.Identity()), batch, 60)
    save_draft(draft, target, run.draft, torch.float32)
    result = fails(examine(run, "norm"), "fit states before the final norm better")
    assert "hand to Medusa heads" in result.mend


def test_a_last_layer_taken_behind_the_norm_is_named(tmp_path, monkeypatch):
    """Trained on hs[8] as transformers hands it out, behind the final norm."""
    values = chat_recipe(tmp_path).model_dump(mode="json")
    values["features"] |= {"source": "online", "layers": [2, 4, 8]}
    recipe = parse_recipe(values, tmp_path)
    run = open_run(tmp_path / "run", recipe)
    right = features.with_states

    def behind(batch, states, last, dtype, head):
        return right(batch, [*states[:-1], head.normed(states[-1])], last, dtype, head)

    with monkeypatch.context() as patch:
        patch.setattr(features, "with_states", behind)
        fit(recipe, run, make_target(recipe), say=quiet)
    fails(examine(run, "norm"), "features of layer 8 were taken behind the final norm")


# rope


def test_a_wrong_theta_is_named_with_what_fits_better(tmp_path):
    run = copied(tmp_path)
    edit(run.draft / "config.json", rope_theta=1.5)
    result = fails(examine(run, "rope"), "with rope_theta 10000", "as declared")
    assert "write rope_theta 10000" in result.mend


def test_a_wrong_head_dim_that_the_weights_allow_is_named(tmp_path):
    run = copied(tmp_path)
    edit(run.draft / "config.json", head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    result = fails(examine(run, "rope"), "with head_dim 8")
    assert result.numbers["head_dim"] == 16


def test_another_theta_that_a_draft_was_trained_with_passes(tmp_path):
    """The masters say the same, and the target's fits no better: nothing is lost by it."""
    run = copied(tmp_path)
    draft_theta = 20000.0  # Near enough to the trained one that nothing is lost.
    for folder in (run.draft, run.draft / "master"):
        edit(folder / "config.json", rope_theta=draft_theta)
    assert examine(run, "rope").status == "PASS"


def test_a_small_model_with_another_theta_than_the_target_it_was_cut_from_is_named(tmp_path):
    run = copied(tmp_path, "kd")
    edit(run.draft / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    fails(examine(run, "rope"), "has theta 500.0, the target 10000.0")


# steps, parity


def test_too_few_ttt_steps_are_named(tmp_path):
    run = healthy(tmp_path, ttt_steps=1)
    result = fails(examine(run, "steps"), "given the steps before", "training unrolled 1 steps")
    assert "ttt_steps: 3" in result.mend
    assert examine(run, "parity").status == "PASS"


def shifted_features(monkeypatch):
    """EAGLE-3: every committed row gets the features of the row before it."""
    right = Eagle3Proposer._commit
    wrong = lambda self, tokens, found, lengths: right(self, tokens, found.roll(1, 1), lengths)  # noqa: E731
    monkeypatch.setattr(Eagle3Proposer, "_commit", wrong)


def the_place_before(monkeypatch):
    """Medusa: the state in front of the one that serving means."""
    right = MedusaProposer._read
    wrong = lambda self, step, columns, token: right(self, step, (columns - 1).clamp_min(0), token)  # noqa: E731
    monkeypatch.setattr(MedusaProposer, "_read", wrong)


def a_stale_cache(monkeypatch):
    """Small models: what was committed is read as if it stood one place further left."""
    right = SmallModelProposer._run_pending

    def wrong(self):
        self._cache.lengths = (self._cache.lengths - 1).clamp_min(0)
        return right(self)

    monkeypatch.setattr(SmallModelProposer, "_run_pending", wrong)


FAULTS = {"eagle3": shifted_features, "medusa": the_place_before, "kd": a_stale_cache}


@pytest.mark.parametrize("method", FAULTS)
def test_serving_at_another_place_than_training_is_named(tmp_path, monkeypatch, method):
    run = copied(tmp_path, method)
    FAULTS[method](monkeypatch)
    result = fails(examine(run, "steps"), "the loop accepts", "teacher-forced")
    assert result.numbers["accepted"] < 0.85 * result.numbers["replayed"]
    fails(examine(run, "parity"), "draft: mean total variation", "does not serve as it was trained")


@pytest.mark.parametrize("method", FAULTS)
def test_written_weights_that_are_not_the_trained_ones_are_named(tmp_path, method):
    run = copied(tmp_path, method)
    folder = exported(run)

    def spoil(tensors):
        torch.manual_seed(0)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim == 2 and "embed" not in name:
                tensor += tensor.std() * torch.randn_like(tensor)

    retensor(folder / "model.safetensors", spoil)
    result = fails(examine(run, "parity"), "export/vllm: mean total variation")
    assert result.numbers["variation"]["draft"] < 1e-3 < result.numbers["variation"]["export/vllm"]
