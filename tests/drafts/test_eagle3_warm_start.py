"""Training on from a published EAGLE-3 draft, in each layout: its map, its feature layers, its weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.data.conversations import DataError
from drafttrain.data.prepare import load_prepared, prepare
from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.eagle3_start import fitted_to
from drafttrain.drafts.loading import load_draft, new_draft, trained_before
from drafttrain.export.eagle3 import write_eagle3
from drafttrain.export.folder import save_draft
from drafttrain.recipe import DraftConfig, parse_recipe
from drafttrain.training.run import start_up_gate, train
from tests.drafts.test_eagle3 import parity_error
from tests.tiny_drafts import make_batch, make_draft
from tests.tiny_drafts import make_target as tiny_target
from tests.tiny_drafts import train as fit
from tests.tiny_medusa import make_heads
from tests.tiny_models import make_model, make_tokenizer, save, tokens
from tests.training.tiny_run import make_target, open_run, settings

IDS = torch.tensor([0, 1, 2, 3, 4, 7, *range(10, 60), 80, 98])
LAYERS = [2, 4, 5]
THEIR_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target on disk, data, and a draft of it that was trained a little, as a folder of the engines' form."""
    folder = tmp_path_factory.mktemp("warm")
    target = make_target(parse_recipe(settings(folder), folder))
    draft = make_draft(target, IDS, LAYERS)
    rows = torch.cat([tokens(4, 20), tokens(4, 20).flip(1)])
    batch = make_batch(target, rows, torch.ones_like(rows, dtype=torch.bool), LAYERS)
    draft.initialise(batch.features.square().mean((0, 1)).sqrt(), target.final_norm.weight.detach())
    draft.calibrate(batch)
    fit(draft, batch, 40)
    (folder / "engines").mkdir()
    write_eagle3(draft, target, folder / "engines", torch.float32)
    save_draft(draft, target, folder / "run" / "draft", torch.bfloat16)
    return folder, target, draft


def safeailab(source, folder, table=None, pickled=True):
    """The same tensors under a config that says little: no ids of the target, no RoPE, 2048 positions."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    if table is not None:
        tensors["embed_tokens.weight"] = table
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **THEIR_SIZES, "draft_vocab_size": len(IDS)}
    (folder / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 2048}))
    return folder


def speculators(source, folder, **changes):
    """layers.0.*, the layer's settings nested, and a target's norm that the file happens to hold."""
    folder.mkdir()
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(source / "model.safetensors").items()}
    save_file(tensors | {"verifier_norm.weight": torch.ones(32)}, folder / "model.safetensors")
    inner = {"model_type": "llama", **THEIR_SIZES, "head_dim": 8, "max_position_embeddings": 128}
    inner |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(IDS),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": inner,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def layouts(home):
    """Folders of the same draft in every layout."""
    folder, target, _ = home
    source, table = folder / "engines", target.embed_weight.half()
    return {
        "engines": source,
        "own run": folder / "run",
        "SafeAILab, pickled": safeailab(source, folder / "pickled"),
        "SafeAILab, with embeddings": safeailab(source, folder / "tables", table, pickled=False),
        "speculators": speculators(source, folder / "speculators"),
    }


def recipe_of(folder, name, draft=None, layers=None, **training):
    values = settings(
        folder, **{"num_train_epochs": 1, "select_by": "loss", "eval_steps": 100, "save_steps": 100, **training}
    )
    values["draft"] = {"init_from": str(name), **(draft or {})}
    if layers is not None:
        values["features"]["layers"] = layers
    return parse_recipe(values, folder)


LAYOUTS = ["engines", "own run", "SafeAILab, pickled", "SafeAILab, with embeddings", "speculators"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_step_is_the_loaded_drafts(home, layouts, name, tmp_path):
    """Loss and acceptance before the first update are those of the draft as it was, in training and in serving."""
    folder, target, draft = home
    recipe = recipe_of(folder, layouts[name])
    prepared = prepare(recipe, open_run(tmp_path / "run", recipe), target, say=lambda message: None)
    assert prepared.layers == LAYERS and torch.equal(prepared.vocab.ids, IDS) and not prepared.statistics
    warm = new_draft(recipe, target, prepared.layers, prepared.vocab.ids, prepared.statistics)
    assert {p.dtype for p in warm.parameters()} == {torch.float32} and warm.embed_tokens is None
    assert (warm.ttt_steps, warm.shape.max_position_embeddings) == (3, 2048 if "Safe" in name else 128)
    said = []
    before = {key: tensor.clone() for key, tensor in warm.state_dict().items()}
    start_up_gate(warm, recipe, prepared, prepared.source(recipe, target, "train"), said.append)
    assert all(torch.equal(tensor, before[key]) for key, tensor in warm.state_dict().items())
    batch = make_batch(target, tokens(4, 20), torch.ones(4, 20, dtype=torch.bool), LAYERS)
    draft.ttt_steps = 3
    mine, theirs = warm(batch).figures, draft(batch).figures
    for part in ("loss", "hits", "alpha"):
        torch.testing.assert_close(getattr(mine, part), getattr(theirs, part), rtol=1e-4, atol=1e-3)
    assert mine.hits[0] > 0.3 * mine.rows[0]
    assert parity_error(target, warm) < 1e-4


@pytest.mark.parametrize("name", ["SafeAILab, pickled", "speculators"])
def test_the_map_is_the_same_after_training(home, layouts, name, tmp_path):
    folder, target, _ = home
    run, said = open_run(tmp_path / "run", recipe_of(folder, layouts[name])), []
    train(recipe_of(folder, layouts[name]), run, target, said.append)
    original, trained = load_file(folder / "engines" / "model.safetensors"), load_file(run.draft / "model.safetensors")
    for key in ("d2t", "t2d"):
        assert torch.equal(trained[key], original[key]) and trained[key].dtype == original[key].dtype
    moved = float((trained["fc.weight"] - original["fc.weight"]).abs().max())
    assert 0 < moved < 0.2 * float(original["fc.weight"].abs().max())
    assert torch.equal(load_file(run.untrained / "model.safetensors")["fc.weight"], original["fc.weight"])
    assert any("data.draft_vocab is 60; the draft of draft.init_from keeps its own words" in line for line in said)
    assert any(f"draft vocabulary: {len(IDS)} of 99" in line for line in said)
    # A second command on the run does not need the draft that it started from.
    moved_away = recipe_of(folder, layouts[name])
    shutil.move(layouts[name], tmp_path / "away")
    try:
        assert torch.equal(load_prepared(moved_away, run, target).vocab.ids, IDS)
    finally:
        shutil.move(tmp_path / "away", layouts[name])


def test_embeddings_of_its_own_stay_and_learn_only_when_asked(home, tmp_path):
    folder, target, _ = home
    table = target.embed_weight + 0.05 * torch.randn(99, 32, generator=torch.Generator().manual_seed(0))
    name = safeailab(folder / "engines", tmp_path / "theirs", table, pickled=False)
    for wanted in (None, False, True):
        draft = {} if wanted is None else {"train_embeddings": wanted}
        warm = new_draft(recipe_of(folder, name, draft), target, LAYERS, IDS, {})
        assert torch.equal(warm.embed_tokens.weight, table) and warm.shape.own_embeddings
        assert warm.embed_tokens.weight.requires_grad is (wanted is True)
    shared = new_draft(recipe_of(folder, folder / "engines", {"train_embeddings": True}), target, LAYERS, IDS, {})
    assert torch.equal(shared.embed_tokens.weight, target.embed_weight) and shared.embed_tokens.weight.requires_grad


def test_masters_keep_their_scales_and_exports_have_them_folded(home, layouts):
    folder, target, draft = home
    masters = trained_before(recipe_of(folder, layouts["own run"]), target)
    assert torch.equal(masters.feature_rms, draft.feature_rms) and torch.equal(masters.fc.weight, draft.fc.weight)
    folded = trained_before(recipe_of(folder, layouts["engines"]), target)
    assert folded.feature_rms.eq(1).all() and torch.equal(folded.fc.weight, draft.fc.weight / draft.feature_rms)


def test_a_stale_vocabulary_of_the_run_does_not_win(home, layouts, tmp_path):
    folder, target, _ = home
    cold = parse_recipe(settings(folder), folder)
    warm = recipe_of(folder, layouts["engines"])
    run = open_run(tmp_path / "cold", cold)
    counted = prepare(cold, run, target, say=lambda message: None)
    assert not torch.equal(counted.vocab.ids, IDS)
    with pytest.raises(DataError, match=r"is stale .*the one that draft.init_from has.*--fresh"):
        prepare(warm, run, target, say=lambda message: None)
    with pytest.raises(DraftError, match=r"not those that the data was prepared for \(60 words.*--fresh"):
        new_draft(warm, target, counted.layers, counted.vocab.ids, counted.statistics)
    run = open_run(tmp_path / "warm", warm)
    prepare(warm, run, target, say=lambda message: None)
    with pytest.raises(DataError, match=r"is stale .*the one that draft.init_from has, now 60"):
        prepare(cold, run, target, say=lambda message: None)
    other = tmp_path / "other"
    other.mkdir()
    ids = torch.cat([IDS[:-1], torch.tensor([97])])
    write_eagle3(make_draft(target, ids, LAYERS), target, other, torch.float32)
    with pytest.raises(DataError, match=r"another vocabulary than that of draft.init_from .*other.*--fresh"):
        prepare(recipe_of(folder, other), run, target, say=lambda message: None)


def test_another_shape_than_the_checkpoints_is_refused(home, layouts):
    folder, target, _ = home
    name = layouts["speculators"]
    trained_before(recipe_of(folder, name, {"num_hidden_layers": 1, "head_dim": 8}, LAYERS), target)
    for draft, layers, message in (
        ({}, [1, 4, 6], r"features.layers is \[1, 4, 6\], there \[2, 4, 5\]"),
        ({"num_hidden_layers": 2}, None, "draft.num_hidden_layers is 2, there 1"),
        ({"hidden_size": 24}, None, "draft.hidden_size is 24, there 32"),
        ({"fc_norm": True}, None, "draft.fc_norm is True, there False"),
        ({"sliding_window": 9}, None, "draft.sliding_window is 9, there None"),
    ):
        with pytest.raises(DraftError, match=rf"init_from is .*{message}.*Expected its own shape.*Mend: leave"):
            trained_before(recipe_of(folder, name, draft, layers), target)


def test_a_target_that_changed(home, layouts, tmp_path):
    """Other weights of the same shape: the same draft starts there. Another shape or tokenizer: refused."""
    folder, _, draft = home
    values = settings(folder)

    def target_of(name, **changes):
        model = make_model("Llama", **{"max_position_embeddings": 128, **changes})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * torch.randn(parameter.shape))
        save(tmp_path / name, model, make_tokenizer())
        return make_target(
            parse_recipe({**values, "target": {**values["target"], "name_or_path": str(tmp_path / name)}})
        )

    tuned = target_of("tuned")
    recipe = recipe_of(folder, layouts["own run"])
    run = open_run(tmp_path / "run", recipe)
    train(recipe, run, tuned, lambda message: None)
    assert torch.equal(load_draft(run.path, tuned).draft_ids, IDS)
    assert torch.equal(load_file(run.untrained / "model.safetensors")["norm.weight"], draft.norm.weight)
    for changes, message in (
        ({"hidden_size": 48}, "hidden size 48"),
        ({"vocab_size": 104}, "vocabulary 104"),
        ({"num_hidden_layers": 4}, "4 layers"),
    ):
        other = target_of("-".join(changes), **changes)
        with pytest.raises(DraftError, match=rf"{message}.*this draft expects vocabulary 99.*Mend"):
            trained_before(recipe, other)
    words = save(tmp_path / "words", make_model("Llama", max_position_embeddings=128), make_tokenizer(words=70))
    elsewhere = make_target(parse_recipe({**values, "target": {**values["target"], "name_or_path": str(words)}}))
    with pytest.raises(DraftError, match="another tokenizer"):
        trained_before(recipe, elsewhere)


def test_a_start_worse_than_guessing_is_refused(home, tmp_path):
    """The gate looks at a warm start too: here the head's rows are in another order than the map says."""
    folder, target, draft = home
    tensors = load_file(folder / "engines" / "model.safetensors")
    (tmp_path / "mixed").mkdir()
    shutil.copy(folder / "engines" / "config.json", tmp_path / "mixed")
    save_file(
        tensors | {"lm_head.weight": 40 * tensors["lm_head.weight"].flip(0)}, tmp_path / "mixed" / "model.safetensors"
    )
    recipe = recipe_of(folder, tmp_path / "mixed")
    with pytest.raises(RunError, match="worse than uniform guessing"):
        train(recipe, open_run(tmp_path / "run", recipe), target, lambda message: None)


def test_all_of_the_targets_positions_without_another_rope():
    """Files that say 2048 positions; YaRN without its original length takes it from there."""
    far = tiny_target(max_position_embeddings=4096)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    plain = Eagle3Config.for_target(far, DraftConfig(), LAYERS, 99)
    for scaling in (None, yarn, {"rope_type": "linear", "factor": 2.0}):
        before = replace(plain, max_position_embeddings=64, rope_scaling=scaling, eos_token_id=None)
        after = fitted_to(before, far)
        assert (after.max_position_embeddings, after.eos_token_id) == (4096, 2)
        rows = torch.arange(300)[None]
        tables = [Eagle3Draft(config).rotary(rows, torch.float32) for config in (before, after)]
        assert torch.equal(tables[0][0], tables[1][0]) and torch.equal(tables[0][1], tables[1][1])
    assert fitted_to(plain, far) == plain


def test_what_is_no_eagle3_draft(home, tmp_path):
    folder, target, _ = home
    make_heads(target).save_pretrained(tmp_path)
    with pytest.raises(DraftError, match=r"a draft of method medusa. Expected an EAGLE-3 draft"):
        trained_before(recipe_of(folder, tmp_path), target)
    with pytest.raises(DraftError, match="holds no draft"):
        trained_before(recipe_of(folder, tmp_path / "absent"), target)


def test_broken_foreign_checkpoints(home, layouts, tmp_path):
    folder, target, _ = home
    broken = safeailab(folder / "engines", tmp_path / "broken")
    (broken / "pytorch_model.bin").write_bytes((broken / "pytorch_model.bin").read_bytes()[:500])
    with pytest.raises(DraftError, match="pytorch_model.bin cannot be read"):
        load_draft(broken, target)
    (broken / "pytorch_model.bin").unlink()
    with pytest.raises(DraftError, match="has no model.safetensors"):
        load_draft(broken, target)
    other = speculators(folder / "engines", tmp_path / "other", speculators_model_type="dflash")
    with pytest.raises(DraftError, match="architectures is .*Eagle3Speculator"):
        load_draft(other, target)
    qwen = speculators(folder / "engines", tmp_path / "qwen")
    tensors = load_file(qwen / "model.safetensors")
    save_file(tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, qwen / "model.safetensors")
    with pytest.raises(DraftError, match="do not fit the config: midlayer.self_attn.q_norm.weight"):
        load_draft(qwen, target)


def test_settings_that_a_layout_leaves_out(home, layouts, tmp_path):
    """speculators without norm_before_residual means true; weights in parts; ids of the nested list alone."""
    folder, target, draft = home
    assert load_draft(layouts["speculators"], target).shape.norm_before_residual is False
    silent = speculators(folder / "engines", tmp_path / "silent")
    values = json.loads((silent / "config.json").read_text())
    del values["norm_before_residual"]
    (silent / "config.json").write_text(json.dumps(values))
    assert load_draft(silent, target).shape.norm_before_residual is True
    parts = tmp_path / "parts"
    parts.mkdir()
    tensors = list(load_file(folder / "engines" / "model.safetensors").items())
    files = {
        "model-00001-of-00002.safetensors": dict(tensors[:5]),
        "model-00002-of-00002.safetensors": dict(tensors[5:]),
    }
    for name, content in files.items():
        save_file(content, parts / name)
    index = {"weight_map": {key: name for name, content in files.items() for key in content}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    values = json.loads((folder / "engines" / "config.json").read_text())
    del values["eagle_aux_hidden_state_layer_ids"]
    values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3, 5]
    (parts / "config.json").write_text(json.dumps(values))
    read = load_draft(parts, target)
    assert read.feature_layers == [1, 4, 6] and torch.equal(read.lm_head.weight, draft.lm_head.weight)
