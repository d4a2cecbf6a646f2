"""`drafttrain check` on Medusa heads, in vLLM's form and the first one: good ones pass, each silent fault is named."""

import pytest
import torch

from tests.export.checked_drafts import (
    IDS,
    checked,
    codes,
    copy,
    edit,
    good_medusa,
    good_original,
    read_target,
    setting,
    target_folder,
    tensors,
    verdicts,
)
from tests.tiny_models import V

BOTH = {"vllm", "tensorrt-llm"}
WORDS = len(IDS)
HEAD, MAP = "lm_head.weight", "token_map"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    """A draft of each form by name."""
    model, parent = read_target(target), tmp_path_factory.mktemp("good")
    return {
        "whole": good_medusa(model, parent / "whole", None),
        "own": good_medusa(model, parent / "own", None, own_heads=True),
        "reduced": good_medusa(model, parent / "reduced"),
        "deep": good_medusa(model, parent / "deep", num_hidden_layers=2),
        "original": good_original(model, parent / "original"),
    }


def drop(*endings):
    return tensors(lambda t: [t.pop(name) for name in list(t) if name.endswith(endings)])


def put(name, make):
    return tensors(lambda t: t.update({name: make(t)}))


def padded(count, name=HEAD):
    return put(name, lambda t: t[name][:count])


MUTATIONS = {
    # name: (form, change, code, engines that must fail with it)
    "no medusa_fc_bias": ("whole", setting(medusa_fc_bias=...), "medusa-fc-bias", {"vllm"}),
    "medusa_fc_bias false": ("reduced", setting(medusa_fc_bias=False), "medusa-fc-bias", {"vllm"}),
    "biases unsaid in the first form": ("original", setting(medusa_fc_bias=...), "medusa-fc-bias", {"vllm"}),
    "no bias": ("whole", drop("1.layers.0.bias"), "missing-bias", {"vllm"}),
    "no head": ("whole", drop(HEAD), "missing-head", {"vllm"}),
    "no head, reduced": ("reduced", drop(HEAD), "missing-head", {"vllm"}),
    "no head of its own": ("own", drop("lm_heads.1.weight"), "missing-head", {"vllm"}),
    "no head in the first form": ("original", drop("2.1.weight"), "missing-head", BOTH),
    "no layer": ("whole", drop("1.layers.0.weight"), "missing-tensor", {"vllm"}),
    "num_attention_heads": ("whole", setting(num_attention_heads=32), "head-count-keys", {"vllm"}),
    "num_key_value_heads": ("whole", setting(num_key_value_heads=8), "head-count-keys", {"vllm"}),
    "more heads than there are": ("whole", setting(num_heads=4), "num-heads", {"vllm"}),
    "fewer heads than there are": ("whole", setting(num_heads=2), "heads-unused", {"vllm"}),
    "first form, more heads": ("original", setting(medusa_num_heads=4), "num-heads", BOTH),
    "vocab_size without padding": ("reduced", setting(vocab_size=V - 4), "vocab-size", {"vllm"}),
    "a head without padding": ("whole", padded(V - 4), "shape", {"vllm"}),
    "no map": ("reduced", drop(MAP), "token-map-missing", {"vllm"}),
    "map unsaid": ("reduced", setting(truncated_vocab_size=V), "token-map-unused", {"vllm"}),
    "map left out": ("reduced", setting(truncated_vocab_size=...), "token-map-unused", {"vllm"}),
    "map short": ("reduced", padded(WORDS - 1, MAP), "token-map-shape", {"vllm"}),
    "map of offsets": ("reduced", put(MAP, lambda t: t[MAP] - torch.arange(WORDS)), "token-map-offsets", {"vllm"}),
    "map unsorted": ("reduced", put(MAP, lambda t: t[MAP].flip(0)), "token-map-unsorted", {"vllm"}),
    "map colliding": ("reduced", put(MAP, lambda t: t[MAP][[0, 0, *range(2, WORDS)]]), "token-map-colliding", {"vllm"}),
    "map beyond": ("reduced", put(MAP, lambda t: t[MAP] + 5), "token-map-out-of-range", {"vllm"}),
    "map one word off": ("reduced", put(MAP, lambda t: t[MAP] + 1), "token-map-shifted", {"vllm"}),
    "map with heads of their own": ("reduced", setting(original_lm_head=False), "token-map-own-heads", {"vllm"}),
    "another width": ("whole", setting(hidden_size=48), "hidden-size", {"vllm"}),
    "other architecture": ("whole", setting(architectures=["LlamaForCausalLM"]), "architectures", {"vllm"}),
    "quantization_config": ("whole", setting(quantization_config={"quant_method": "awq"}), "quantization", {"vllm"}),
    "tied": ("whole", setting(tie_word_embeddings=True), "tied-embeddings", {"vllm"}),
    "half a dtype": ("whole", put(HEAD, lambda t: t[HEAD].half()), "dtype-mixed", {"vllm"}),
    "another dtype": ("whole", setting(torch_dtype="float16"), "dtype-config", {"vllm"}),
    "nan": ("whole", put(HEAD, lambda t: t[HEAD] * float("nan")), "not-finite", {"vllm"}),
    "nan in the first form": ("original", put("0.1.weight", lambda t: t["0.1.weight"] / 0), "not-finite", BOTH),
    "zeros": (
        "deep",
        put("blocks.2.layers.1.weight", lambda t: torch.zeros(32, 32, dtype=torch.bfloat16)),
        "all-zero",
        {"vllm"},
    ),
    "masters": ("whole", put("input_rms", lambda t: torch.ones(32)), "input-scales", {"vllm"}),
    "unknown tensor": ("whole", put("adapter", lambda t: torch.ones(3).bfloat16()), "unknown-tensor", {"vllm"}),
    "another tokenizer": (
        "whole",
        lambda folder: edit(folder, "drafttrain.json", tokenizer_sha256="0" * 64),
        "tokenizer",
        {"vllm"},
    ),
    "a tuned target's": (
        "whole",
        lambda folder: edit(folder, "drafttrain.json", tuned_from={"name": "x"}, target_fingerprint="0" * 64),
        "tuned-target",
        {"vllm"},
    ),
}


@pytest.mark.parametrize("form", ["whole", "own", "reduced", "deep", "original"])
def test_good_heads_pass(form, folders, target):
    report = checked(folders[form], target)
    rest = dict.fromkeys(("sglang", "llama.cpp", "transformers"), "UNSUPPORTED")
    old = "PASS" if form == "original" else "UNSUPPORTED"
    assert verdicts(report) == rest | {"vllm": "PASS", "tensorrt-llm": old} and report.exit_status == 0
    assert report.method == "medusa" and ("original" in report.layout) == (form == "original")
    notes = [verdict.notes for verdict in report.engines if verdict.engine == "vllm"][0]
    assert any("enable_weights_track" in note for note in notes) == (form in ("reduced", "deep"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_is_named(name, folders, target, tmp_path):
    form, change, code, engines = MUTATIONS[name]
    change(copy(folders[form], tmp_path / "draft"))
    report = checked(tmp_path / "draft", target)
    assert {engine for engine, named in codes(report).items() if code in named} == engines, codes(report)
    assert report.exit_status == 1


def test_sequential_heads_are_served_by_nobody(target, tmp_path):
    draft = good_medusa(read_target(target), tmp_path / "draft", None, sequential=True)
    report = checked(draft, target)
    assert set(verdicts(report).values()) == {"UNSUPPORTED"} and report.exit_status == 1


def test_one_engine_asked_for(folders, target):
    assert checked(folders["whole"], target, "vllm").exit_status == 0
    assert checked(folders["whole"], target, "vllm,sglang").exit_status == 1
    assert checked(folders["whole"], target, "tensorrt-llm").exit_status == 1
    assert checked(folders["original"], target, "tensorrt-llm").exit_status == 0
