"""The directory of a small draft: what engines load is the trained model, padded, in the dtype asked for."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.loading import load_draft
from drafttrain.export.base import ExportError
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.serve import check_engine, check_layers, serve_command
from tests.tiny_models import V, make_model, save
from tests.tiny_students import IDS, make_target, trained

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def target():
    return make_target()


def test_transformers_loads_it_as_it_was_trained(target, tmp_path):
    draft = trained(target, lora={"r": 2, "target_modules": ["q_proj", "down_proj"]})
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    export_draft(tmp_path / "draft", target, tmp_path / "export", k=5)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, draft.student(TOKENS).logits, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"]) == (V, 3)
    assert "quantization_config" not in config
    settings = GenerationConfig.from_pretrained(tmp_path / "export")
    assert settings.num_assistant_tokens == 5
    assert (settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold) == ("constant", 0.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").get_vocab() == target.tokenizer.get_vocab()
    assert not (tmp_path / "export" / "master").exists()


def test_every_word_leaves_also_with_a_smaller_draft_vocabulary(target, tmp_path):
    draft = trained(target, IDS)
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    assert [path.name for path in (tmp_path / "draft").glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert model.lm_head.weight.shape[0] == V


def test_another_dtype_comes_from_the_masters(target, tmp_path):
    draft = trained(target)
    save_draft(draft, target, tmp_path / "draft", torch.bfloat16)
    export_draft(tmp_path / "draft", target, tmp_path / "half", torch.float16)
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        name = "model.layers.1.mlp.up_proj.weight"
        found = file.get_tensor(name)
        assert found.dtype == torch.float16
        assert torch.equal(found, dict(draft.student.named_parameters())[name].half())
    facts = json.loads((tmp_path / "half" / "drafttrain.json").read_text())
    assert (facts["method"], facts["student"]) == ("kd", "small")


def test_numbers_that_do_not_fit_the_dtype_are_named(target, tmp_path):
    draft = trained(target)
    with torch.no_grad():
        draft.student.model.norm.weight[0] = 1e5
    with pytest.raises(ExportError, match=r"model\.norm\.weight hold numbers that are not finite in torch.float16"):
        save_draft(draft, target, tmp_path / "draft", torch.float16)
    assert not (tmp_path / "draft").exists()


def test_other_folders_are_left_alone(target, tmp_path):
    save_draft(trained(target, IDS), target, tmp_path / "draft", torch.float32)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="holds notes.txt"):
        export_draft(tmp_path / "draft", target, tmp_path / "export")
    assert (tmp_path / "export" / "notes.txt").read_text() == "mine"
    (tmp_path / "export" / "notes.txt").unlink()
    assert export_draft(tmp_path / "draft", target, tmp_path / "export", k=2) == 2
    assert (tmp_path / "export" / "draft_ids.json").exists()
    (tmp_path / "draft" / "draft_ids.json").unlink()
    assert export_draft(tmp_path / "draft", target, tmp_path / "export", k=2) == 2
    assert not (tmp_path / "export" / "draft_ids.json").exists()


def test_another_padding_leaves_as_it_was_evaluated(target, tmp_path):
    """A small model from elsewhere, of more rows, in float16, which CPUs do not load."""
    torch.manual_seed(3)
    wide = make_model("Qwen3", vocab_size=128, num_hidden_layers=2, max_position_embeddings=256)
    save(tmp_path / "hub", wide.half(), target.tokenizer)
    export_draft(tmp_path / "hub", target, tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found["model.embed_tokens.weight"].shape[0] == V
    assert json.loads((tmp_path / "export" / "config.json").read_text())["vocab_size"] == V
    stored = dict(wide.named_parameters())
    assert all(tensor.dtype == torch.float16 for tensor in found.values())
    assert all(torch.equal(tensor, stored[name][: len(tensor)]) for name, tensor in found.items())
    with pytest.raises(ExportError, match=r"holds torch.float16 weights and no fp32 masters"):
        export_draft(tmp_path / "hub", target, tmp_path / "narrow", torch.bfloat16)
    assert not (tmp_path / "narrow").exists()


def test_masters_of_another_draft_are_refused(target, tmp_path):
    save_draft(trained(target), target, tmp_path / "draft", torch.bfloat16)
    save_draft(trained(target, layers=(0, 1, 2, 7)), target, tmp_path / "other", torch.bfloat16)
    shutil.copy(tmp_path / "other" / "master" / "model.safetensors", tmp_path / "draft" / "master")
    with pytest.raises(ExportError, match=r"holds model\.layers\.3\..*does not have"):
        export_draft(tmp_path / "draft", target, tmp_path / "export", torch.float16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("drafttrain.json", "[]", "drafttrain.json holds a JSON list"),
        ("draft_ids.json", "[3, 2]", "not a draft vocabulary"),
        ("draft_ids.json", '["a"]', "not a draft vocabulary"),
        ("draft_ids.json", "[1, 99]", "not a draft vocabulary"),
        ("draft_ids.json", "", "not a draft vocabulary"),
    ],
)
def test_broken_files_of_a_draft_are_named(target, tmp_path, name, content, message):
    save_draft(trained(target), target, tmp_path / "draft", torch.float32)
    (tmp_path / "draft" / name).write_text(content)
    with pytest.raises(DraftError, match=message):
        load_draft(tmp_path / "draft", target)


def test_commands_of_the_engines(target):
    assert '"method": "draft_model"' in serve_command("vllm", target, "out", 4, "kd")
    gemma = serve_command("vllm", make_target("Gemma3"), "out", 4, "kd")
    assert "--model-impl" not in gemma and "--disable-hybrid-kv-cache-manager" in gemma
    assert "--disable-hybrid" not in serve_command("vllm", make_target("Llama"), "out", 4, "kd")
    mistral = make_target("Mistral")
    mistral.config.sliding_window = None
    assert "--disable-hybrid" not in serve_command("vllm", mistral, "out", 4, "kd")
    assert "--speculative-algorithm STANDALONE" in serve_command("sglang", target, "out", 4, "kd")
    assert 'assistant_model="out"' in serve_command("transformers", target, "out", 4, "kd")
    assert "-md out/draft.gguf --spec-type draft-simple " in serve_command("llama.cpp", target, "out", 4, "kd")


def test_engines_that_would_serve_another_model_are_refused(tmp_path):
    with pytest.raises(ExportError, match="expected one of vllm, sglang, transformers, llama.cpp"):
        check_engine("tensorrt-llm", "kd", tmp_path)
    for family in ("Gemma2", "Gemma3"):
        save_draft(
            trained(make_target(family), layers=(0, 2, 7)), make_target(family), tmp_path / family, torch.float32
        )
    check_engine("vllm", "kd", tmp_path / "Gemma2")
    with pytest.raises(ExportError, match="type 'gemma2'. draft.gguf is written for llama"):
        check_engine("llama.cpp", "kd", tmp_path / "Gemma2")
    check_engine("llama.cpp", "kd", tmp_path / "Gemma3")


def test_layers_that_llama_cpp_s_own_converter_gets_wrong(tmp_path):
    config = make_target("Gemma2").config  # Sliding, full, sliding, full ..
    check_layers("llama.cpp", config, "the student")
    config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    check_layers("vllm", config, "the student")
    with pytest.raises(ExportError, match=r"the student: layers \[2\] of 3 have full attention.*here \[1\]"):
        check_layers("llama.cpp", config, "the student")
