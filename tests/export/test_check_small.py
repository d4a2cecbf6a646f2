"""`drafttrain check` on small drafts and on what is no draft: good ones pass, each silent fault is named; the verb."""

import json

import pytest
import torch

from drafttrain.drafts.base import DraftError
from drafttrain.export.base import ExportError
from drafttrain.export.check_engines import ENGINES, TABLE, consequence
from tests.export.checked_drafts import (
    checked,
    codes,
    copy,
    edit,
    edit_tensors,
    good_small,
    read_target,
    setting,
    target_folder,
    tensors,
    verdicts,
)
from tests.tiny_models import V, make_model, make_tokenizer, save

ALL = {"vllm", "sglang", "transformers", "llama.cpp"}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def good(target, tmp_path_factory):
    return good_small(read_target(target), tmp_path_factory.mktemp("good") / "draft")


def cut(rows):
    """A draft of the tokenizer's own words, unpadded, and sound in itself."""

    def change(folder):
        edit_tensors(folder, lambda t: t.update({name: t[name][:rows] for name in (EMBED, HEAD)}))
        edit(folder, vocab_size=rows)

    return change


MUTATIONS = {
    # name: (change, code, engines that must fail with it)
    "vocabulary without padding": (cut(V - 4), "vocab-size", {"vllm", "sglang", "transformers"}),
    "vocab_size of the target, rows without padding": (
        tensors(lambda t: t.update({name: t[name][: V - 4] for name in (EMBED, HEAD)})),
        "embedding-rows",
        ALL,
    ),
    "no head": (tensors(lambda t: t.pop(HEAD)), "missing-head", ALL),
    "no layer": (tensors(lambda t: t.pop(UP)), "missing-tensor", ALL),
    "unknown tensor": (tensors(lambda t: t.update(adapter=torch.ones(3).bfloat16())), "unknown-tensor", ALL),
    "another shape": (tensors(lambda t: t.update({UP: t[UP][:40]})), "shape", ALL),
    "tied, with a head of its own": (setting(tie_word_embeddings=True), "tied-head-differs", {"sglang", "llama.cpp"}),
    "capped positions": (setting(max_position_embeddings=64), "positions", ALL),
    "quantization_config": (setting(quantization_config={"quant_method": "awq"}), "quantization", ALL),
    "architecture": (setting(architectures=["Qwen3ForCausalLM"]), "architectures", ALL),
    "no architecture": (setting(architectures=...), "architectures", ALL),
    "half a dtype": (tensors(lambda t: t.update({UP: t[UP].half()})), "dtype-mixed", ALL),
    "another dtype": (setting(dtype="float16"), "dtype-config", ALL),
    "nan": (tensors(lambda t: t[UP].view(-1)[:1].fill_(float("nan"))), "not-finite", ALL),
    "zeros": (tensors(lambda t: t[UP].zero_()), "all-zero", ALL),
    "another tokenizer, said": (setting("drafttrain.json", tokenizer_sha256="0" * 64), "tokenizer", ALL),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation-config",
        {"transformers"},
    ),
    "a confidence threshold": (
        setting("generation_config.json", assistant_confidence_threshold=0.4),
        "generation-config",
        {"transformers"},
    ),
    "a schedule": (
        setting("generation_config.json", num_assistant_tokens_schedule="heuristic"),
        "generation-config",
        {"transformers"},
    ),
}


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_good_drafts_pass(family, tmp_path):
    target = target_folder(tmp_path / "target", family)
    # llama.cpp gives Gemma 3 full attention in every sixth layer.
    layers = (0, 1, 2, 3, 4, 5, 7) if family == "Gemma3" else (0, 3, 7)
    report = checked(good_small(read_target(target), tmp_path / "draft", layers=layers), target)
    assert verdicts(report) == dict.fromkeys(sorted(ALL), "PASS") | {"tensorrt-llm": "UNSUPPORTED"}
    assert (report.method, report.exit_status) == ("kd", 0)
    notes = [note for verdict in report.engines for note in verdict.notes]
    assert any("--disable-hybrid-kv-cache-manager" in note for note in notes) == (family == "Gemma3")


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_fault_is_named(name, good, target, tmp_path):
    change, code, engines = MUTATIONS[name]
    change(copy(good, tmp_path / "draft"))
    report = checked(tmp_path / "draft", target)
    assert {engine for engine, named in codes(report).items() if code in named} == engines, codes(report)
    assert report.exit_status == 1


def test_another_padding_is_near_enough_for_llama_cpp(tmp_path):
    target = target_folder(tmp_path / "target")
    save(tmp_path / "near", make_model("Llama", vocab_size=128, max_position_embeddings=256).bfloat16())
    save(tmp_path / "far", make_model("Llama", vocab_size=256, max_position_embeddings=256).bfloat16())
    assert "vocab-size" not in codes(checked(tmp_path / "near", target)).get("llama.cpp", ())
    assert "vocab-size" in codes(checked(tmp_path / "far", target))["llama.cpp"]


def test_a_tokenizer_beside_the_draft(good, target, tmp_path):
    folder = copy(good, tmp_path / "draft")
    (folder / "drafttrain.json").unlink()
    assert checked(folder, target).exit_status == 0
    make_tokenizer(words=70).save_pretrained(folder)
    assert all("tokenizer" in named for named in codes(checked(folder, target)).values())


def test_layers_that_llama_cpp_would_run_otherwise(tmp_path):
    target = target_folder(tmp_path / "target", "Gemma2")
    report = checked(good_small(read_target(target), tmp_path / "draft", layers=(0, 2, 7)), target)
    assert codes(report) == {"llama.cpp": {"layer-pattern"}}


def test_every_row_of_the_table_concerns_some_engine():
    for method, rows in TABLE.items():
        for code, row in rows.items():
            assert set(row) <= {*ENGINES, "*"}
            assert any(consequence(method, code, engine) for engine in ENGINES), (method, code)


def test_what_is_no_draft(target, tmp_path):
    with pytest.raises(DraftError, match="holds no draft"):
        checked(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(DraftError, match="has no weights"):
        checked(tmp_path, target)
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DraftError, match="first tensors are encoder.weight"):
        checked(tmp_path, target)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cut")
    with pytest.raises(DraftError, match=r"pytorch_model\.bin cannot be read"):
        checked(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "dflash"}))
    torch.save({"encoder.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DraftError, match="speculators_model_type is 'dflash'"):
        checked(tmp_path, target)


def test_an_unknown_engine(good, target):
    with pytest.raises(ExportError, match="--engine is 'tgi', expected all or some of vllm"):
        checked(good, target, "vllm,tgi")


def test_the_verb(cli, good, target, tmp_path):
    code, out, err = cli("check", good, "--target", target)
    assert code == 0 and "PASS        vllm" in out and "UNSUPPORTED tensorrt-llm" in out, out
    assert out.strip().splitlines()[-1].startswith("PASS: vllm, sglang, llama.cpp, transformers; UNSUPPORTED:")
    folder = edit(copy(good, tmp_path / "draft"), max_position_embeddings=64)
    code, out, err = cli("check", folder, "--target", target, "--engine", "vllm", "--json")
    report = json.loads(out)
    assert code == report["exit_status"] == 1 and [v["engine"] for v in report["engines"]] == ["vllm"]
    (finding,) = report["engines"][0]["findings"]
    assert finding["code"] == "positions" and "write 256" in finding["mend"]
    assert cli("check", good, "--target", target, "--engine", "tensorrt-llm")[0] == 1
    code, out, err = cli("check", tmp_path / "nowhere", "--target", target)
    assert code == 1 and "holds no draft" in err and not out
