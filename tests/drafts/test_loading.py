"""Draft checkpoints: round trips, the target's own settings in the config, named errors for what is broken."""

import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from drafttrain.drafts import DraftError, load_draft
from drafttrain.drafts.base import write_provenance
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.recipe import DraftConfig
from drafttrain.specdec.decode import generate
from tests.tiny_drafts import LAYERS, features_of, make_draft, make_target
from tests.tiny_models import V, make_tokenizer, tokens

IDS = torch.arange(1, V, 2)
LINEAR = {"rope_type": "linear", "rope_theta": 77000.0, "factor": 2.0}


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer(), rope_parameters=LINEAR)


@pytest.fixture
def folder(target, tmp_path):
    make_draft(target, IDS, norm_before_residual=True, num_key_value_heads=1).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, drop=(), **changes):
    path = folder / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(values | changes))


def edit_tensors(folder, drop=(), **changes):
    path = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if name not in drop} | changes, path)


def test_round_trip(target, folder):
    draft = make_draft(target, IDS, norm_before_residual=True, num_key_value_heads=1)
    loaded = load_draft(folder, target)
    assert loaded.shape == draft.shape and not loaded.training
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == tensor.dtype
    ids = tokens(1, 9)
    for mine, theirs in zip(
        loaded.unroll(ids, features_of(target, ids), 3), draft.unroll(ids, features_of(target, ids), 3), strict=True
    ):
        assert torch.equal(mine, theirs)
    runs = [generate(target, ids.tolist(), d.proposer(target), max_new_tokens=9) for d in (loaded, draft)]
    assert runs[0].generations == runs[1].generations


def test_dtypes(target, folder):
    half = load_draft(folder, target, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.feature_rms.dtype == torch.float32 and half.d2t.dtype == torch.int64
    half.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_draft(folder, target).fc.weight.dtype == torch.bfloat16


def test_run_folder(target, folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    folder.rename(run / "draft")
    assert load_draft(run, target).shape == load_draft(run / "draft", target).shape


def test_an_export_without_feature_rms_t2d_or_identity_map(target, folder):
    edit_tensors(folder, drop=("feature_rms", "t2d"))
    draft = load_draft(folder, target)
    assert draft.feature_rms.eq(1).all() and torch.equal(draft.t2d.nonzero()[:, 0], IDS)
    make_draft(target).save_pretrained(folder)
    edit_tensors(folder, drop=("d2t", "t2d"))
    assert torch.equal(load_draft(folder, target).draft_ids, torch.arange(V))


def test_the_config_is_the_targets_own(target):
    config = Eagle3Config.for_target(target, DraftConfig(), LAYERS, 40)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.head_dim) == (target.rms_norm_eps, 256, 8)
    assert (config.rope_theta, config.rope_scaling) == (77000.0, {"rope_type": "linear", "factor": 2.0})
    assert (config.hidden_size, config.target_hidden_size, config.vocab_size, config.draft_vocab_size) == (
        32,
        32,
        V,
        40,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 2, 48)
    other = make_target(rms_norm_eps=1e-3, head_dim=16, max_position_embeddings=333)
    config = Eagle3Config.for_target(other, DraftConfig(), LAYERS, 40)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.head_dim) == (1e-3, 333, 16)
    values = config.to_json(torch.bfloat16)
    assert values["eagle_aux_hidden_state_layer_ids"] == LAYERS
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in LAYERS]


def test_sizes_that_cannot_be(target):
    with pytest.raises(DraftError, match=r"num_attention_heads is 4, draft.num_key_value_heads 3"):
        Eagle3Config.for_target(target, DraftConfig(num_key_value_heads=3), LAYERS, 40)
    odd = make_target(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(DraftError, match="rope_type is 'dynamic'"):
        Eagle3Config.for_target(odd, DraftConfig(), LAYERS, 40)
    with pytest.raises(DraftError, match=r"draft.head_dim is 7. Expected an even number"):
        Eagle3Config.for_target(target, DraftConfig(head_dim=7), LAYERS, 40)


def test_another_target(target, folder):
    for changes, message in (
        ({"vocab_size": 98}, "vocabulary 98"),
        ({"hidden_size": 48}, "hidden size 48"),
        ({"num_hidden_layers": 5}, "5 layers"),
    ):
        with pytest.raises(DraftError, match=rf"{message}.*Mend"):
            load_draft(folder, make_target(**changes))
    write_provenance(folder, target)
    load_draft(folder, target)
    with pytest.raises(DraftError, match="another tokenizer"):
        load_draft(folder, make_target(tokenizer=make_tokenizer(words=70), rope_parameters=LINEAR))


def test_nothing_there(target, tmp_path, monkeypatch):
    for name in (tmp_path, tmp_path / "absent", "./absent", "absent", "a/b/c"):
        with pytest.raises(DraftError, match="holds no draft"):
            load_draft(name, target)
    with pytest.raises(DraftError, match="has no config.json"):
        Eagle3Config.load(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-draft", "no body/no such draft"):
        with pytest.raises(DraftError, match="neither a local folder nor in the hub's cache"):
            load_draft(name, target)


def test_a_hub_snapshot_without_a_draft(target, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--thing" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("no draft")
    (tmp_path / "models--some--thing" / "refs").mkdir()
    (tmp_path / "models--some--thing" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DraftError, match="nor in the hub's cache"):
        load_draft("some/thing", target)
    make_draft(target).save_pretrained(snapshot)
    assert load_draft("some/thing", target).shape.vocab_size == V


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*or a causal"),
        ({"architectures": None}, "architectures is None"),
        ({"norm_before_fc": True, "drop": ["eagle_config"]}, "do not fit the config: input_norm.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, "do not fit the config: input_norm.weight"),
        ({"attention_bias": True}, "asks for attention_bias"),
        ({"partial_rotary_factor": 0.5}, "asks for partial_rotary_factor"),
        ({"fc_norm": True, "norm_output": True}, "do not fit the config: fc_norm.0.weight, fc_norm.1.weight"),
        ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight.*with 2 layers"),
        ({"drop": ["hidden_size", "vocab_size"]}, "does not give hidden_size, vocab_size"),
        ({"drop": ["head_dim"], "hidden_size": "32"}, "does not give hidden_size, head_dim"),
        (
            {"drop": ["eagle_aux_hidden_state_layer_ids", "eagle_config"], "num_aux_hidden_states": 4},
            "does not give eagle_aux_hidden_state_layer_ids",
        ),
        ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\], sliding_window None"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
            "with the same window, or none",
        ),
        ({"num_key_value_heads": 3}, "Expected a multiple"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"intermediate_size": 50}, r"mlp.down_proj.weight \(32, 48\) for \(32, 50\)"),
        ({"draft_vocab_size": 48}, r"d2t of shape \(49,\) is no vocabulary map"),
    ],
)
def test_broken_configs(target, folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(DraftError, match=message):
        load_draft(folder, target)


def test_the_class_itself_refuses_another_architecture(folder):
    edit_config(folder, architectures=["Other"])
    with pytest.raises(DraftError, match="LlamaForCausalLMEagle3"):
        Eagle3Draft.from_pretrained(folder)


def test_config_that_is_not_json(target, folder):
    (folder / "config.json").write_text("{")
    for read in (lambda: load_draft(folder, target), lambda: Eagle3Config.load(folder)):
        with pytest.raises(DraftError, match="cannot be read as JSON"):
            read()


@pytest.mark.parametrize(
    ("drop", "changes", "message"),
    [
        (["d2t"], {}, "no d2t, but its draft vocabulary has 49 of 99"),
        (["lm_head.weight"], {}, "do not fit the config: lm_head.weight"),
        (["norm.weight"], {"layers.1.norm.weight": torch.zeros(32)}, "layers.1.norm.weight, norm.weight"),
        ([], {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}, "q_proj.bias"),
        ([], {"d2t": torch.zeros(49, dtype=torch.long) - 1}, "no vocabulary map"),
        ([], {"d2t": IDS}, "no vocabulary map"),
        ([], {"d2t": torch.arange(49).flip(0)}, "no vocabulary map"),
    ],
)
def test_broken_weights(target, folder, drop, changes, message):
    edit_tensors(folder, drop, **changes)
    with pytest.raises(DraftError, match=message):
        load_draft(folder, target)


def test_weights_that_are_absent_or_cut(target, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DraftError, match="cannot be read"):
        load_draft(folder, target)
    path.unlink()
    with pytest.raises(DraftError, match="no model.safetensors"):
        load_draft(folder, target)
