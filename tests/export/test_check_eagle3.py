"""`drafttrain check` on EAGLE-3: good exports pass, each silent fault is named, drafts from elsewhere are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafts.test_eagle3 import LLAMA3
from tests.export.checked_drafts import (
    DEFAULTS,
    IDS,
    checked,
    codes,
    copy,
    edit,
    edit_tensors,
    good_eagle3,
    read_target,
    setting,
    settings,
    target_folder,
    tensors,
    verdicts,
)
from tests.tiny_models import V, make_tokenizer

ALL = {"vllm", "sglang", "tensorrt-llm", "llama.cpp"}
WORDS = len(IDS)
TOP, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def good(target, tmp_path_factory):
    return good_eagle3(read_target(target), tmp_path_factory.mktemp("good") / "draft")


def nested(ids, **changes):
    values = {"use_aux_hidden_state": True, TOP: ids, "norm_before_fc": False} | changes
    return {NESTED: {key: value for key, value in values.items() if value is not ...}}


def drop(*names):
    return tensors(lambda t: [t.pop(name) for name in names])


def put(**new):
    """New values by name, `__` for a dot."""
    return tensors(lambda t: t.update({name.replace("__", "."): make(t) for name, make in new.items()}))


def filled(name, value):
    return tensors(lambda t: t[name].view(-1)[:1].fill_(value))


def rows(count, shape=()):
    return lambda t: torch.ones(count, *shape, dtype=torch.bfloat16)


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def offsets(ids):
    return lambda t: torch.as_tensor(ids) - torch.arange(len(ids))


SWAPPED = IDS[[1, 0, *range(2, WORDS)]]
TWICE = IDS[[0, 0, *range(2, WORDS)]]
BEYOND = IDS + torch.tensor([0] * (WORDS - 1) + [V])
MUTATIONS = {
    # name: (change, code, engines that must fail with it)
    "no head": (drop("lm_head.weight"), "missing-head", ALL),
    "no d2t": (drop("d2t"), "missing-d2t", ALL),
    "no maps": (drop("d2t", "t2d"), "missing-d2t", ALL),
    "no norm": (drop("midlayer.hidden_norm.weight"), "missing-tensor", ALL),
    "no fc": (drop("fc.weight"), "missing-tensor", ALL),
    "unknown tensor": (put(adapter__weight=rows(3)), "unknown-tensor", ALL),
    "masters": (put(feature_rms=rows(96)), "feature-scales", ALL),
    "prefixed names": (
        tensors(lambda t: t.update({f"model.{n}": t.pop(n) for n in list(t) if n.startswith(("fc", "midlayer"))})),
        "name-prefix",
        ALL - {"sglang"},
    ),
    "d2t as ids": (put(d2t=lambda t: IDS), "d2t-absolute-ids", ALL),
    "d2t as ids, no t2d": (both(drop("t2d"), put(d2t=lambda t: IDS)), "d2t-absolute-ids", ALL),
    "d2t unsorted": (put(d2t=offsets(SWAPPED)), "d2t-unsorted", ALL),
    "d2t colliding": (put(d2t=offsets(TWICE)), "d2t-colliding", ALL),
    "d2t out of range": (put(d2t=offsets(BEYOND)), "d2t-out-of-range", ALL),
    "d2t negative": (put(d2t=offsets(IDS - 1)), "d2t-out-of-range", ALL),
    "d2t one word off": (put(d2t=offsets(IDS + 1)), "t2d-disagrees", ALL),
    "d2t zeros": (put(d2t=lambda t: torch.zeros(WORDS, dtype=torch.long)), "d2t-zero", ALL),
    "d2t short": (put(d2t=lambda t: t["d2t"][:-1]), "d2t-shape", ALL),
    "d2t float": (put(d2t=lambda t: t["d2t"].float()), "d2t-dtype", ALL),
    "vocab_size without padding": (setting(vocab_size=V - 4), "vocab-size", ALL),
    "no draft_vocab_size": (setting(draft_vocab_size=...), "draft-vocab-size", ALL),
    "another draft_vocab_size": (setting(draft_vocab_size=WORDS + 1), "shape", ALL),
    "no layer ids": (setting(**{TOP: ..., NESTED: ...}), "layer-ids-missing", ALL),
    "nested ids alone": (setting(**{TOP: ...}), "layer-ids-nested-only", {"vllm"}),
    "top ids alone": (setting(**{TOP: [1, 4, 6], NESTED: ...}), "layer-ids-top-only", {"sglang", "tensorrt-llm"}),
    "ids of one convention": (setting(**nested(DEFAULTS)), "layer-ids-disagree", ALL),
    "ids of other tensors": (setting(**{TOP: [2, 4, 6]}), "layer-ids-disagree", ALL),
    "ids unsorted": (setting(**{TOP: [5, 2, 4], **nested([4, 1, 3])}), "layer-ids-unsorted", ALL),
    "ids twice": (setting(**{TOP: [2, 4, 4], **nested([1, 3, 3])}), "layer-ids-duplicate", ALL),
    "ids beyond": (setting(**{TOP: [2, 4, 9], **nested([1, 3, 8])}), "layer-ids-range", ALL),
    "two ids": (setting(**{TOP: [2, 5], **nested([1, 4])}), "shape", ALL),
    "num_aux": (setting(num_aux_hidden_states=4), "num-aux", {"vllm", "sglang"}),
    "features off": (setting(**nested([1, 3, 4], use_aux_hidden_state=False)), "aux-off", ALL - {"llama.cpp"}),
    "norm_before_residual": (
        setting(norm_before_residual=True),
        "norm_before_residual",
        {"sglang", "tensorrt-llm"},
    ),
    "fc_norm": (
        both(setting(fc_norm=True), put(**{f"fc_norm__{i}__weight": rows(32) for i in range(3)})),
        "fc_norm",
        {"llama.cpp"},
    ),
    "fc_norm without norms": (setting(fc_norm=True), "missing-tensor", ALL),
    "norms without fc_norm": (put(fc_norm__0__weight=rows(32)), "unused-tensor", ALL),
    "norm_output": (setting(norm_output=True), "norm_output", {"llama.cpp"}),
    "norm_before_fc at the top": (
        both(setting(norm_before_fc=True, **nested([1, 3, 4], norm_before_fc=...)), put(input_norm__weight=rows(96))),
        "norm-before-fc-nested",
        {"tensorrt-llm"},
    ),
    "norm_before_fc in conflict": (
        both(setting(norm_before_fc=True), put(input_norm__weight=rows(96))),
        "norm-before-fc-nested",
        {"vllm", "sglang", "tensorrt-llm"},
    ),
    "q and k norms": (
        put(midlayer__self_attn__q_norm__weight=rows(8), midlayer__self_attn__k_norm__weight=rows(8)),
        "qk_norm",
        ALL,
    ),
    "attention biases": (
        both(
            setting(attention_bias=True),
            put(**{f"midlayer__self_attn__{n}_proj__bias": rows(c) for n, c in (("q", 32), ("k", 16), ("v", 16))}),
        ),
        "attention_bias",
        {"sglang", "llama.cpp"},
    ),
    "biases unsaid": (put(midlayer__self_attn__q_proj__bias=rows(32)), "unused-tensor", ALL),
    "mlp biases": (
        both(
            setting(mlp_bias=True),
            put(**{f"midlayer__mlp__{n}_proj__bias": rows(c) for n, c in (("gate", 48), ("up", 48), ("down", 32))}),
        ),
        "mlp_bias",
        {"sglang", "llama.cpp"},
    ),
    "fc bias": (put(fc__bias=rows(32)), "fc_bias", {"vllm", "llama.cpp"}),
    "own embeddings": (put(embed_tokens__weight=rows(V, (32,))), "own_embeddings", {"sglang", "tensorrt-llm"}),
    "two layers": (setting(num_hidden_layers=2), "several_layers", {"sglang", "tensorrt-llm", "llama.cpp"}),
    "window": (
        setting(sliding_window=4, layer_types=["sliding_attention"]),
        "sliding_window",
        {"sglang", "tensorrt-llm", "llama.cpp"},
    ),
    "capped positions": (setting(max_position_embeddings=64), "positions", ALL),
    "rope_theta": (setting(rope_theta=500000.0), "rope-theta", ALL),
    "rope scaling": (setting(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope-scaling", ALL),
    "eps": (setting(rms_norm_eps=1e-5), "eps", ALL),
    "quantization_config": (setting(quantization_config={"quant_method": "awq", "bits": 4}), "quantization", ALL),
    "tied": (setting(tie_word_embeddings=True), "tied-embeddings", ALL),
    "plain architecture": (setting(architectures=["LlamaForCausalLM"]), "architectures", {"sglang"}),
    "other architecture": (setting(architectures=["DraftModel"]), "architectures", ALL),
    "no model_type": (setting(model_type=...), "model-type", {"vllm", "sglang"}),
    "activation": (setting(hidden_act="gelu"), "hidden-act", ALL),
    "target_hidden_size": (setting(target_hidden_size=48), "target-hidden-size", ALL),
    "half a dtype": (put(lm_head__weight=lambda t: t["lm_head.weight"].half()), "dtype-mixed", ALL),
    "another dtype": (setting(torch_dtype="float16"), "dtype-config", ALL),
    "nan": (filled("midlayer.mlp.up_proj.weight", float("nan")), "not-finite", ALL),
    "inf": (filled("norm.weight", float("inf")), "not-finite", ALL),
    "zeros": (put(fc__weight=lambda t: torch.zeros_like(t["fc.weight"])), "all-zero", ALL),
    "another tokenizer": (
        lambda folder: edit(folder, "drafttrain.json", tokenizer_sha256="0" * 64),
        "tokenizer",
        ALL,
    ),
    "another tokenizer beside it": (
        both(
            lambda folder: (folder / "drafttrain.json").unlink(),
            lambda folder: make_tokenizer(words=70).save_pretrained(folder),
        ),
        "tokenizer",
        ALL,
    ),
}
PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
HARMLESS = {
    "top ids alone, the defaults": setting(**{NESTED: ...}),
    "no t2d": drop("t2d"),
    "more positions": setting(max_position_embeddings=512),
    "eps as GGUF rounds it": setting(rms_norm_eps=1.0004e-6),
    "no drafttrain.json": lambda folder: (folder / "drafttrain.json").unlink(),
    "rope_parameters": setting(rope_theta=..., rope_scaling=..., rope_parameters=PLAIN),
}


@pytest.mark.parametrize(("name", "change"), HARMLESS.items())
def test_harmless_changes_pass(name, change, good, target, tmp_path):
    change(copy(good, tmp_path / "draft"))
    report = checked(tmp_path / "draft", target)
    assert codes(report) == {} and report.exit_status == 0


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
@pytest.mark.parametrize("choices", [{}, {"ids": None}, {"layers": [1, 4, 6]}], ids=["", "whole vocabulary", "layers"])
def test_good_exports_pass(family, choices, tmp_path):
    target = target_folder(tmp_path / "target", family)
    report = checked(good_eagle3(read_target(target), tmp_path / "draft", **choices), target)
    assert verdicts(report) == dict.fromkeys(sorted(ALL), "PASS") | {"transformers": "UNSUPPORTED"}
    assert (report.method, report.layout, report.exit_status) == ("eagle3", "drafttrain", 0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_is_named(name, good, target, tmp_path):
    change, code, engines = MUTATIONS[name]
    change(copy(good, tmp_path / "draft"))
    report = checked(tmp_path / "draft", target)
    found = {engine for engine, named in codes(report).items() if code in named}
    assert found == engines, codes(report)
    assert report.exit_status == 1
    for verdict in report.engines:
        assert all(f.found and f.would and f.mend for f in verdict.findings)


def test_four_features(target, tmp_path):
    report = checked(good_eagle3(read_target(target), tmp_path / "draft", layers=[1, 4, 6, 8]), target)
    assert codes(report) == {"llama.cpp": {"aux_count"}}


def test_a_whole_vocabulary_has_no_map(target, tmp_path):
    draft = good_eagle3(read_target(target), tmp_path / "draft", ids=None)
    assert checked(draft, target).exit_status == 0
    edit_tensors(draft, lambda t: t.update(d2t=torch.zeros(V, dtype=torch.long)))
    assert codes(checked(draft, target)) == dict.fromkeys(ALL, {"unexpected-d2t"})


def test_what_is_the_targets_is_compared_with_this_target(tmp_path):
    """Llama-3's scaling, a full-attention entry beside a sliding one, and a fixed eps of another size."""
    scaled = target_folder(tmp_path / "scaled", rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    draft = good_eagle3(read_target(scaled), tmp_path / "draft")
    assert checked(draft, scaled).exit_status == 0
    gemma = target_folder(tmp_path / "gemma", "Gemma3")
    report = checked(good_eagle3(read_target(gemma), tmp_path / "for gemma"), gemma)
    expected = {"vllm": "PASS", "sglang": "PASS", "tensorrt-llm": "PASS", "llama.cpp": "UNSUPPORTED"}
    assert verdicts(report) == expected | {"transformers": "UNSUPPORTED"} and report.exit_status == 0
    notes = {verdict.engine: verdict.notes for verdict in report.engines}
    assert any("--model-impl transformers" in note for note in notes["vllm"])
    crossed = codes(checked(draft, gemma))
    assert {"rope-theta", "rope-scaling", "eps"} <= crossed["vllm"]


def test_a_target_family_that_captures_nothing(tmp_path):
    granite = target_folder(tmp_path / "target", "Granite")
    draft = good_eagle3(read_target(granite), tmp_path / "draft")
    report = checked(draft, granite, "sglang")
    assert verdicts(report) == {"sglang": "UNSUPPORTED"} and report.exit_status == 1
    assert [finding.code for finding in report.engines[0].findings] == ["target-family"]


def test_another_width_needs_embeddings_of_its_own(tmp_path):
    target = target_folder(tmp_path / "target")
    draft = good_eagle3(read_target(target), tmp_path / "draft", hidden_size=48)
    assert checked(draft, target).exit_status == 0
    edit_tensors(draft, lambda t: t.pop("embed_tokens.weight"))
    assert all("missing-embeddings" in named for named in codes(checked(draft, target)).values())
    assert set(codes(checked(draft, target))) == ALL


def test_a_copy_of_the_targets_embeddings_is_harmless(good, target, tmp_path):
    """As speculators writes it; without the target's weights one cannot tell."""
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    folder = edit_tensors(copy(good, tmp_path / "draft"), lambda t: t.update({"embed_tokens.weight": table}))
    assert checked(folder, target).exit_status == 0
    copy(target, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    named = codes(checked(folder, tmp_path / "target"))
    assert named == dict.fromkeys(("sglang", "tensorrt-llm"), {"own_embeddings"})


def test_weights_of_the_target_are_not_needed(good, target, tmp_path):
    copy(target, tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    assert checked(good, tmp_path / "target").exit_status == 0


# Drafts from elsewhere.


def as_specforge(folder):
    """SpecForge: its architecture, the target's table beside the draft, SGLang's list or none."""
    edit(folder, **{TOP: ..., "target_hidden_size": ..., "num_aux_hidden_states": ..., "norm_before_residual": ...})
    (folder / "drafttrain.json").unlink()
    return folder


def as_safeailab(folder):
    """SafeAILab: a plain architecture, no ids, a pickled file, settings of its own time."""
    keep = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    keep += ("num_hidden_layers", "rms_norm_eps", "vocab_size", "draft_vocab_size", "tie_word_embeddings")
    values = {key: value for key, value in settings(folder).items() if key in keep}
    values |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "drafttrain.json").unlink()
    return folder


def as_speculators(folder, **changes):
    """speculators: nested settings of transformers 5, layers.0.*, no nested list."""
    values = settings(folder)
    inner = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "model_type")
    inner += ("num_hidden_layers", "rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act")
    layer = {key: values[key] for key in inner} | {"rope_parameters": PLAIN}
    verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": values["draft_vocab_size"],
        "norm_before_residual": False,
        TOP: values[TOP],
        "transformer_layer_config": layer,
        "tie_word_embeddings": True,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": verifier},
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not ...}))
    stored = load_file(folder / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): x for n, x in stored.items()}, folder / "model.safetensors")
    (folder / "drafttrain.json").unlink()
    return folder


def test_specforge(good, target, tmp_path):
    folder = as_specforge(copy(good, tmp_path / "draft"))
    report = checked(folder, target)
    assert report.layout == "SpecForge" and codes(report) == {"vllm": {"layer-ids-nested-only"}}
    assert checked(edit(folder, **{TOP: DEFAULTS}), target).exit_status == 0
    assert "layer-ids-missing" in codes(checked(edit(folder, **{TOP: ..., NESTED: ...}), target))["vllm"]


def test_safeailab(good, target, tmp_path):
    """Its code knows one choice of layers, so that ids are not missed; published ones are capped and have no theta."""
    folder = as_safeailab(copy(good, tmp_path / "draft"))
    report = checked(folder, target)
    assert report.layout == "SafeAILab" and codes(report) == {"sglang": {"architectures"}}
    published = codes(checked(edit(folder, max_position_embeddings=64), target))
    assert published["vllm"] == {"positions"}
    theta = target_folder(tmp_path / "theta", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert codes(checked(folder, theta))["vllm"] == {"positions", "rope-theta"}


def test_speculators(good, target, tmp_path):
    report = checked(as_speculators(copy(good, tmp_path / "draft")), target)
    expected = {"vllm": "PASS", "llama.cpp": "PASS", "sglang": "UNSUPPORTED", "tensorrt-llm": "UNSUPPORTED"}
    assert report.layout == "speculators"
    assert verdicts(report) == expected | {"transformers": "UNSUPPORTED"} and report.exit_status == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"norm_before_residual": ...}, "norm-before-residual-unsaid"),
        ({TOP: ...}, "layer-ids-missing"),
        ({TOP: [4, 2, 5]}, "layer-ids-unsorted"),
        ({TOP: [2, 3, 4, 5]}, "num-aux"),
        ({"draft_vocab_size": ...}, "draft-vocab-size"),
    ],
)
def test_faults_of_speculators_settings(changes, code, good, target, tmp_path):
    folder = as_speculators(copy(good, tmp_path / "draft"), **changes)
    assert code in codes(checked(folder, target))["vllm"]


def test_a_qwen3_layer_of_speculators_has_its_norms_in_vllm(good, target, tmp_path):
    folder = as_speculators(copy(good, tmp_path / "draft"))
    names = [f"layers.0.self_attn.{name}_norm.weight" for name in ("q", "k")]
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8, dtype=torch.bfloat16) for name in names}))
    assert "qk_norm" in codes(checked(folder, target))["vllm"]
    edit(folder, transformer_layer_config=settings(folder)["transformer_layer_config"] | {"model_type": "qwen3"})
    assert "vllm" not in codes(checked(folder, target))
