"""Adapters: which modules get them, that only they train, and that the merged model computes the same."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafttrain.drafts.adapters import add_adapters, merged
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.students import build_student, run_student
from drafttrain.recipe import DraftConfig, LoraConfig
from drafttrain.target import Target
from tests.tiny_models import make_model, tokens

LINEARS = {
    "Llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "Phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
}


def adapted(family="Gemma3", dtype=torch.float32, **settings):
    """A pruned student with adapters whose B is not zero any more."""
    target = Target.from_model(make_model(family).to(dtype))
    student = build_student(DraftConfig(lora=LoraConfig(r=4, alpha=6, **settings)), target, [0, 2, 5, 7], seed=3)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return target, student


def names_of(student):
    return {
        name.split(".lora_A.")[0].rpartition(".")[2] for name, _ in student.named_parameters() if ".lora_A." in name
    }


@pytest.mark.parametrize("family", LINEARS)
def test_all_linear_layers_but_the_head_are_adapted(family):
    _, student = adapted(family)
    assert names_of(student) == LINEARS[family]
    counted = sum(".lora_A." in name for name, _ in student.named_parameters())
    assert counted == 4 * len(LINEARS[family])


def test_chosen_modules_and_sizes():
    _, student = adapted("Llama", target_modules=["q_proj", "mlp.up_proj"])
    assert names_of(student) == {"q_proj", "up_proj"}
    shapes = {tuple(p.shape) for name, p in student.named_parameters() if ".lora_A." in name}
    assert shapes == {(4, 32)}


@pytest.mark.parametrize("wanted", ["query", "lm_head", "proj", "input_layernorm"])
def test_modules_that_are_not_there_are_named_with_those_that_are(wanted):
    with pytest.raises(DraftError, match=f"names {wanted};.*down_proj, gate_proj, k_proj, o_proj"):
        adapted("Llama", target_modules=["q_proj", wanted])


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Gemma3", "Phi3"])
def test_the_merged_model_is_plain_and_computes_the_same(family, tmp_path):
    target, student = adapted(family)
    plain = merged(student)
    assert type(plain) is type(target.model)
    assert not any("lora" in name or "base_layer" in name for name, _ in plain.named_parameters())
    with torch.no_grad():
        expected = student(tokens()).logits
        assert torch.allclose(plain(tokens()).logits, expected, atol=1e-4)
        zero = build_student(DraftConfig(), target, [0, 2, 5, 7])
        assert not torch.allclose(zero(tokens()).logits, expected, atol=1e-2)
        plain.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert torch.allclose(again(tokens()).logits, expected, atol=1e-4)
        assert torch.equal(student(tokens()).logits, expected)
    assert plain.get_input_embeddings().weight.data_ptr() == target.embed_weight.data_ptr()


def test_the_merged_weight_is_the_old_one_plus_the_scaled_product():
    target, student = adapted("Llama")
    layer = student.model.layers[1].self_attn.q_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = target.layers[2].self_attn.q_proj.weight + 6 / 4 * product
    assert torch.allclose(merged(student).model.layers[1].self_attn.q_proj.weight, expected, atol=1e-6)


def test_adapters_on_bf16_stay_fp32_train_and_merge_in_fp32():
    target, student = adapted("Gemma3", torch.bfloat16)
    kinds = {(p.requires_grad, p.dtype) for p in student.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run_student(student, tokens()).float().square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters() if p.requires_grad)
    plain = merged(student)
    layer = student.model.layers[1].self_attn.q_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = target.layers[2].self_attn.q_proj.weight.float() + 6 / 4 * product
    assert torch.allclose(plain.model.layers[1].self_attn.q_proj.weight, expected, atol=1e-6)
    assert plain.model.norm.weight.dtype == torch.float32
    assert plain.get_output_embeddings().weight.data_ptr() == target.lm_head_weight.data_ptr()
    narrow = merged(student, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert narrow.get_output_embeddings().weight.data_ptr() == target.lm_head_weight.data_ptr()
    assert narrow.get_output_embeddings().weight is narrow.get_input_embeddings().weight
    assert torch.equal(narrow.model.layers[1].self_attn.q_proj.weight, expected.bfloat16())


def test_a_model_without_adapters_is_returned_itself_and_cast_when_asked():
    target = Target.from_model(make_model("Qwen3").to(torch.bfloat16))
    student = build_student(DraftConfig(), target, [0, 7])
    assert merged(student) is student
    narrow = merged(student, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in student.model.layers.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in student.model.layers.parameters())


def test_the_seed_alone_decides_the_adapters():
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(17)
        before = torch.rand(1)
        torch.manual_seed(17)
        model = add_adapters(make_model("Llama").requires_grad_(False), LoraConfig(r=2), seed)
        torch.manual_seed(17)
        assert torch.equal(torch.rand(1), before)
        draws.append(next(p for name, p in model.named_parameters() if ".lora_A." in name).detach())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_fresh_student_takes_no_adapters():
    target = Target.from_model(make_model("Llama"))
    with pytest.raises(DraftError, match="leave draft.lora out"):
        build_student(DraftConfig(student="fresh", hidden_size=16, lora=LoraConfig()), target)
