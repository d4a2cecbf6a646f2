"""The frozen target against transformers itself: hs[k], heads, stop ids, fingerprints, loading from folders.

All models are tiny and random; each expected value comes from the model's own forward."""

import json

import pytest
import torch
import transformers

from drafttrain.target import (
    Target,
    TargetError,
    TargetHead,
    check_feature_layers,
    default_feature_layers,
    load_target,
)
from tests.tiny_models import FAMILIES, SIZES, N, V, make_model, make_tokenizer, save, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_head_equal_the_models_own(family):
    model = make_model(family)
    target = Target.from_model(model)
    own = model(input_ids=tokens(), output_hidden_states=True, use_cache=False)
    states = target.hidden_states(tokens(), None, range(N + 1))
    for k in range(N):
        torch.testing.assert_close(states[k], own.hidden_states[k], rtol=0, atol=0)
    head = target.head()
    assert (states[N] - own.hidden_states[N]).abs().max() > 0.1
    torch.testing.assert_close(target.final_norm(states[N]), own.hidden_states[N])
    torch.testing.assert_close(head.normed(states[N]), own.hidden_states[N])
    torch.testing.assert_close(head(states[N]), own.logits)
    assert head.weight.data_ptr() == target.lm_head_weight.data_ptr()
    rows = torch.tensor([70, 3, 98])
    torch.testing.assert_close(target.head(rows)(states[N]), own.logits[..., rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_leaves_rows_as_they_are(family):
    target = Target.from_model(make_model(family))
    ids, lengths = tokens(3), torch.tensor([11, 4, 7])
    ids[torch.arange(11)[None] >= lengths[:, None]] = 0
    layers = [0, 2, N]
    padded = target.hidden_states(ids, lengths, layers)
    for row, length in enumerate(lengths.tolist()):
        alone = target.hidden_states(ids[row : row + 1, :length], None, layers)
        for k in layers:
            assert (padded[k][row, :length] - alone[k][0]).abs().max() < 1e-4 * alone[k].abs().max()
            assert not padded[k][row, length:].any()


def test_target_is_frozen_and_its_facts_come_from_the_config():
    target = Target.from_model(make_model("Llama", rms_norm_eps=3e-6, rope_theta=5e5), name="tiny")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (N, 32, V)
    assert (target.max_positions, target.rms_norm_eps, target.stop_ids) == (64, 3e-6, (2,))
    assert target.rope() == {"rope_theta": 5e5, "rope_scaling": None}
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    assert target.embed_weight.shape == target.lm_head_weight.shape == (V, 32)
    assert len(target.layers) == N and target.dtype == torch.float32
    assert not target.hidden_states(tokens(), None, [2])[2].requires_grad


def test_rope_of_the_full_attention_layers_and_scaling():
    gemma = Target.from_model(make_model("Gemma3"))
    assert gemma.rope() == {"rope_theta": 1_000_000.0, "rope_scaling": None}
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    llama = Target.from_model(make_model("Llama", rope_parameters={"rope_theta": 5e5, **scaling}))
    assert llama.rope() == {"rope_theta": 5e5, "rope_scaling": scaling}


def test_tied_and_untied_heads():
    tied = Target.from_model(make_model("Qwen3"))
    untied = Target.from_model(make_model("Llama"))
    assert tied.lm_head_weight.data_ptr() == tied.embed_weight.data_ptr()
    assert untied.lm_head_weight.data_ptr() != untied.embed_weight.data_ptr()


def test_embed_weight_is_the_raw_table():
    target = Target.from_model(make_model("Gemma3"))
    ids = tokens()
    states = target.hidden_states(ids, None, [0])
    torch.testing.assert_close(states[0], target.embed_weight[ids] * 32**0.5)


def test_target_head_by_hand():
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    head = TargetHead(torch.nn.Identity(), weight, bias=torch.tensor([0.0, 1.0, 0.0]), softcap=2.0, scale=0.5)
    hidden = torch.tensor([2.0, 1.0])
    torch.testing.assert_close(head(hidden), 2 * torch.tanh(torch.tensor([2.0, 3.0, 3.0]) * 0.5 / 2))
    doubling = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(doubling.weight).data.mul_(2)
    torch.testing.assert_close(TargetHead(doubling, weight)(hidden), torch.tensor([4.0, 4.0, 6.0]))
    torch.testing.assert_close(TargetHead(doubling, weight, normed=True)(hidden), torch.tensor([2.0, 2.0, 3.0]))
    assert TargetHead(torch.nn.Identity(), weight.bfloat16())(hidden).dtype == torch.bfloat16


def test_head_of_strided_bfloat16_states():
    target = Target.from_model(make_model("Llama").bfloat16())
    states = target.hidden_states(tokens(), None, [N])[N]
    strided = torch.cat([states, states], -1)[..., :32]
    assert not strided.is_contiguous()
    torch.testing.assert_close(target.head()(strided), target.head()(states))


def test_hooks_go_even_when_a_forward_fails():
    target = Target.from_model(make_model("Llama"))
    with pytest.raises(IndexError), target.capture([0, 3, N]):
        target.model(input_ids=torch.tensor([[V + 5]]))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)
    with pytest.raises(TargetError), target.capture([3, 2]):
        pass
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.layers)


def test_capture_is_refilled_by_each_forward():
    target = Target.from_model(make_model("Llama"))
    with target.capture([2]) as states:
        assert states == {}
        target.model(input_ids=tokens(1, 5))
        first = states[2]
        target.model(input_ids=tokens(1, 7))
        assert states[2].shape == (1, 7, 32) and first.shape == (1, 5, 32)


def test_feature_layers():
    assert default_feature_layers(32) == [2, 16, 29]
    assert default_feature_layers(7) == [2, 3, 4]
    assert check_feature_layers((0, 5, 8), 8) == [0, 5, 8]
    with pytest.raises(TargetError, match=r"features\.layers"):
        default_feature_layers(6)
    for wrong in ([], [2, 2], [3, 1], [-1, 2], [2, 9]):
        with pytest.raises(TargetError, match=r"within 0\.\.8"):
            check_feature_layers(wrong, 8)


def test_stop_ids_of_model_and_tokenizer():
    model = make_model("Llama")
    model.generation_config.eos_token_id = [2, 40]
    assert Target.from_model(model, make_tokenizer()).stop_ids == (2, 3, 40)
    phi = make_tokenizer(specials=("<pad>", "<bos>", "<eos>", "<|end|>"))
    assert Target.from_model(make_model("Llama"), phi).stop_ids == (2, 3)
    harmony = make_tokenizer(specials=("<pad>", "<bos>", "<eos>", "<|end|>", "<|return|>"))
    assert Target.from_model(make_model("Llama"), harmony).stop_ids == (2, 4)


@pytest.mark.parametrize(("family", "shard"), [("Llama", "20KB"), ("Qwen3", "20KB"), ("Qwen3", "1GB")])
def test_folders_sharded_and_single(tmp_path, family, shard):
    model = make_model(family)
    save(tmp_path, model, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    target = load_target(str(tmp_path), device="cpu")
    assert target.dtype == torch.float32 and target.folder == tmp_path and len(target.tokenizer) == 95
    expected = model(input_ids=tokens()).logits
    torch.testing.assert_close(target.head()(target.hidden_states(tokens(), None, [N])[N]), expected)


@pytest.mark.parametrize(
    ("stored", "written", "asked", "loaded"),
    [
        ("bfloat16", None, "auto", "bfloat16"),
        ("float16", None, "auto", "bfloat16"),
        ("bfloat16", "float32", "auto", "bfloat16"),
        ("float32", None, "auto", "float32"),
        ("bfloat16", None, "float32", "float32"),
    ],
)
def test_dtype(tmp_path, stored, written, asked, loaded):
    save(tmp_path, make_model("Llama").to(getattr(torch, stored)))
    if written is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": written}))
    target = load_target(str(tmp_path), dtype=asked, device="cpu")
    assert target.dtype == target.model.dtype == getattr(torch, loaded)


def test_multimodal_wrapper(tmp_path):
    torch.manual_seed(0)
    text = {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8}
    text.pop("attn_implementation")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    save(tmp_path, transformers.Gemma3ForConditionalGeneration(config))
    target = load_target(str(tmp_path), device="cpu")
    assert isinstance(target.model, transformers.Gemma3ForConditionalGeneration)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (N, 32, V)
    own = target.model(input_ids=tokens(), output_hidden_states=True)
    states = target.hidden_states(tokens(), None, [0, 3, N])
    torch.testing.assert_close(states[3], own.hidden_states[3])
    torch.testing.assert_close(target.head()(states[N]), own.logits)


def test_fingerprint_of_a_folder(tmp_path):
    model = make_model("Llama")
    prints = [load_target(str(save(tmp_path / name, model)), device="cpu").fingerprint for name in "ab"]
    assert prints[0] == prints[1] and len(prints[0]) == 64
    tokenizer = make_tokenizer(words=91)
    prints.append(load_target(str(save(tmp_path / "tokenizer", model, tokenizer)), device="cpu").fingerprint)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    prints.append(load_target(str(save(tmp_path / "template", model, tokenizer)), device="cpu").fingerprint)
    model.model.layers[N - 1].mlp.down_proj.weight.data += 0.01
    prints.append(load_target(str(save(tmp_path / "weights", model)), device="cpu").fingerprint)
    assert len(set(prints)) == 4


def test_fingerprint_in_memory():
    model = make_model("Llama")
    first = Target.from_model(model).fingerprint
    assert Target.from_model(make_model("Llama")).fingerprint == first
    assert Target.from_model(model, make_tokenizer()).fingerprint != first
    model.model.layers[3].mlp.up_proj.weight.data[5, 7] += 0.5
    assert Target.from_model(model).fingerprint != first
