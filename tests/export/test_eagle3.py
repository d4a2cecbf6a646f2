"""The EAGLE-3 directory: tensors and config as engines read them; drafts that propose the same after a round trip."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from drafttrain.cli import app
from drafttrain.data import files
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.loading import load_draft
from drafttrain.export.base import ExportError
from drafttrain.export.eagle3 import write_eagle3
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.serve import ENGINES, serve_command
from drafttrain.nn.sampling import Sampling
from drafttrain.specdec.decode import generate
from tests.drafts.test_eagle3 import LLAMA3, parity_error
from tests.tiny_drafts import make_draft, make_target
from tests.tiny_models import V, make_tokenizer, tokens

IDS = torch.tensor([0, 1, 2, 3, 5, 9, *range(20, 50), 97])
PROMPTS = [tokens(1, 6)[0].tolist(), tokens(1, 11)[0].tolist()]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer())


@pytest.fixture(scope="module")
def draft(target):
    return make_draft(target, IDS).requires_grad_(False)


@pytest.fixture
def folder(target, draft, tmp_path):
    """A run's draft folder, bf16 with fp32 masters."""
    save_draft(draft, target, tmp_path / "run" / "draft", BF16, validation={"acceptance_length": 2.5})
    return tmp_path / "run" / "draft"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def content(folder):
    """The files but for the card, which each export has anew."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != "README.md"]
    return {path.name: path.read_bytes() for path in files}


def test_tensors(folder):
    """FORMATS: names without a prefix, shapes, one dtype, and no more than that."""
    H, I, A, nh, nkv, hd, Vd = 32, 48, 3, 4, 2, 8, len(IDS)  # noqa: E741
    floats = {
        "fc.weight": (H, A * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (nh * hd, 2 * H),
        "midlayer.self_attn.k_proj.weight": (nkv * hd, 2 * H),
        "midlayer.self_attn.v_proj.weight": (nkv * hd, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, nh * hd),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "midlayer.mlp.down_proj.weight": (H, I),
        "norm.weight": (H,),
        "lm_head.weight": (Vd, H),
    }
    expected = {name: (shape, BF16) for name, shape in floats.items()}
    expected |= {"d2t": ((Vd,), torch.int64), "t2d": ((V,), torch.bool)}
    stored = load_file(folder / "model.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == expected


def test_vocabulary_map(folder):
    """d2t holds offsets: target id = i + d2t[i]; t2d is true exactly there."""
    stored = load_file(folder / "model.safetensors")
    assert stored["d2t"][:8].tolist() == [0, 0, 0, 0, 1, 4, 14, 14] and int(stored["d2t"][-1]) == 97 - (len(IDS) - 1)
    assert stored["t2d"].nonzero()[:, 0].tolist() == IDS.tolist()


def test_whole_vocabulary_has_no_map(target, tmp_path):
    write_eagle3(make_draft(target), target, tmp_path, BF16)
    stored = load_file(tmp_path / "model.safetensors")
    assert "d2t" not in stored and "t2d" not in stored and stored["lm_head.weight"].shape == (V, 32)
    assert config_of(tmp_path)["draft_vocab_size"] == config_of(tmp_path)["vocab_size"] == V
    assert load_draft(tmp_path, target).draft_ids.tolist() == list(range(V))


def test_config(folder):
    assert config_of(folder) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": V,
        "draft_vocab_size": len(IDS),
        "target_hidden_size": 32,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 3, 5],
            "norm_before_fc": False,
        },
    }


def test_what_belongs_to_the_target_comes_from_it(tmp_path):
    cases = {
        "llama3": (make_target(rope_parameters=LLAMA3, rms_norm_eps=1e-5, max_position_embeddings=777), 500000.0),
        "gemma": (make_target("Gemma3", eos_token_id=[2, 7]), 1_000_000.0),
    }
    for name, (target, theta) in cases.items():
        (tmp_path / name).mkdir()
        write_eagle3(make_draft(target, norm_before_residual=name == "gemma"), target, tmp_path / name, BF16)
        assert config_of(tmp_path / name)["rope_theta"] == theta
    llama3, gemma = config_of(tmp_path / "llama3"), config_of(tmp_path / "gemma")
    assert llama3["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert (llama3["rms_norm_eps"], llama3["max_position_embeddings"]) == (1e-5, 777)
    assert gemma["rope_scaling"] is None and gemma["eos_token_id"] == [2, 7] and gemma["norm_before_residual"] is True
    sliding = cases["gemma"][0].model.config.rope_parameters["sliding_attention"]["rope_theta"]
    assert sliding == 10000.0  # the entry that must not be taken


def test_feature_scales_are_folded_into_fc(target, draft, folder):
    """fc of the raw feature equals fc of the scaled one, also when the scales span six decades."""
    wild = copy.deepcopy(draft).attach(target)
    wild.feature_rms.copy_(torch.logspace(-2, 4, len(wild.feature_rms)))
    for name, one, dtype, tolerance in (
        ("bf16", draft, BF16, 2e-2),
        ("wild", wild, BF16, 2e-2),
        ("fp32", wild, FP32, 1e-5),
    ):
        path = folder / name
        path.mkdir()
        write_eagle3(one, target, path, dtype)
        stored = load_file(path / "model.safetensors")
        assert "feature_rms" not in stored
        features = torch.randn(20, len(one.feature_rms), generator=torch.Generator().manual_seed(0)) * one.feature_rms
        expected, found = one.fuse(features), features @ stored["fc.weight"].float().T
        assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())
    assert float((features @ wild.fc.weight.T - expected).abs().max()) > float(expected.abs().max())  # unfolded


def test_provenance(target, folder):
    facts = json.loads((folder / "drafttrain.json").read_text())
    assert facts["target"] == "tiny Llama" and facts["target_fingerprint"] == target.fingerprint
    assert facts["validation"] == {"acceptance_length": 2.5} and len(facts["tokenizer_sha256"]) == 64
    assert load_draft(folder.parent, target).fc.weight.dtype == BF16  # the run folder is found
    with pytest.raises(DraftError, match="another tokenizer"):
        load_draft(folder, make_target(tokenizer=make_tokenizer(words=70)))


def folded(draft, target, dtype):
    """The draft in memory as it is meant to be served: scales folded in fp32, then cast."""
    served = copy.deepcopy(draft).attach(target)
    served.fc.weight.copy_(served.fc.weight / served.feature_rms)
    served.feature_rms.fill_(1)
    return served.to(dtype).attach(target)


def proposals(draft, target, sampling, k):
    """Tokens of generation, counts, and the draft logits of every single draft step."""
    seen = []
    handle = draft.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    done = generate(target, PROMPTS, draft.proposer(target), k=k, sampling=sampling, max_new_tokens=16, stop_ids=())
    handle.remove()
    return [g.tokens for g in done.generations], done.counts, seen


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, draft_mode="probabilistic")], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_memory_folder_and_export_propose_the_same_bit_for_bit(target, draft, tmp_path, dtype, sampling):
    save_draft(draft, target, tmp_path / "draft", dtype)
    export_draft(tmp_path / "draft", target, tmp_path / "export")
    reference = proposals(folded(draft, target, dtype), target, sampling, 3)
    assert len(reference[2]) >= 3 * 5
    for folder in (tmp_path / "draft", tmp_path / "export"):
        found = proposals(load_draft(folder, target), target, sampling, 3)
        assert found[:2] == reference[:2]
        assert all(torch.equal(a, b) for a, b in zip(found[2], reference[2], strict=True))


def test_an_export_copies_the_very_files(target, folder, tmp_path):
    export_draft(folder, target, tmp_path / "export" / "vllm")
    assert content(tmp_path / "export" / "vllm") == content(folder)
    assert {path.name for path in (tmp_path / "export").iterdir()} == {"vllm"}


def test_masters_alone_leave_in_the_engines_form(target, draft, folder, tmp_path):
    """Not copied: engines know no feature_rms, and fc alone would read features that are not scaled."""
    (tmp_path / "saved").mkdir()
    draft.save_pretrained(tmp_path / "saved")
    export_draft(tmp_path / "saved", target, tmp_path / "export")
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert "feature_rms" not in found
    assert torch.equal(found["fc.weight"], draft.fc.weight / draft.feature_rms)


def test_another_dtype_comes_from_the_masters(target, draft, folder, tmp_path):
    (tmp_path / "direct").mkdir()
    write_eagle3(draft, target, tmp_path / "direct", FP16, validation={"acceptance_length": 2.5})
    export_draft(folder, target, tmp_path / "export", FP16)
    assert content(tmp_path / "export") == content(tmp_path / "direct")
    assert config_of(tmp_path / "export")["torch_dtype"] == "float16"
    assert load_draft(tmp_path / "export", target).fc.weight.dtype == FP16


def test_masters_go_on_training_where_they_were(target, draft, folder):
    masters = Eagle3Draft.from_pretrained(folder / "master")
    assert masters.shape == draft.shape
    for name, tensor in draft.state_dict().items():
        assert torch.equal(masters.state_dict()[name], tensor) and masters.state_dict()[name].dtype == tensor.dtype


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": LLAMA3}], ids=["plain rope", "llama3 rope"])
def test_cached_drafting_of_a_reloaded_export_is_its_own_training_time_unroll(tmp_path, changes):
    target = make_target(**changes)
    save_draft(make_draft(target, IDS), target, tmp_path / "draft", FP32)
    export_draft(tmp_path / "draft", target, tmp_path / "export")
    assert parity_error(target, load_draft(tmp_path / "export", target)) < 1e-4


def test_layer_ids_of_the_other_convention_are_caught(target, draft, folder):
    """The check that proposals stay the same fails when the nested list is taken as hs[k]."""
    reference = proposals(folded(draft, target, BF16), target, Sampling(), 3)
    values = config_of(folder)
    values["eagle_aux_hidden_state_layer_ids"] = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(values))
    found = proposals(load_draft(folder, target), target, Sampling(), 3)
    assert not torch.equal(found[2][0], reference[2][0])


def test_an_export_replaces_a_former_one_whole(target, draft, folder, tmp_path):
    export_draft(folder, target, tmp_path / "export", FP16)
    export_draft(folder, target, tmp_path / "export")
    assert content(tmp_path / "export") == content(folder)


@pytest.mark.parametrize("broken", ["nan", "infinite", "half"])
def test_numbers_that_do_not_survive_are_refused_and_the_old_folder_stays(target, draft, folder, broken):
    before, masters = content(folder), content(folder / "master")
    bad = copy.deepcopy(draft)
    value = {"nan": float("nan"), "infinite": float("inf"), "half": 1e5}[broken]
    bad.midlayer.mlp.up_proj.weight[3, 4] = value
    with pytest.raises(ExportError, match=r"midlayer.mlp.up_proj.weight hold.*Mend"):
        save_draft(bad, target, folder, FP16 if broken == "half" else BF16)
    assert content(folder) == before and content(folder / "master") == masters
    assert {path.name for path in folder.parent.iterdir()} == {"draft"}


def test_nothing_is_left_of_a_first_export_that_fails(target, draft, tmp_path):
    bad = copy.deepcopy(draft)
    bad.norm.weight[0] = float("nan")
    with pytest.raises(ExportError, match="norm.weight"):
        save_draft(bad, target, tmp_path / "run" / "draft", BF16)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_that_fails_half_way_leaves_the_old_folder(tmp_path):
    path = tmp_path / "draft"

    def fill(text, fail=False):
        def write(folder):
            (folder / "a").write_text(text)
            if fail:
                raise OSError(28, "No space left on device")
            (folder / "b").write_text(text)

        return write

    files.replace_folder(path, fill("old"))
    with pytest.raises(OSError, match="No space left"):
        files.replace_folder(path, fill("new", fail=True))
    assert {p.name: p.read_text() for p in path.iterdir()} == {"a": "old", "b": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]
    files.replace_folder(path, fill("new"))
    assert (path / "a").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_folders_of_something_else_are_not_replaced(target, folder, tmp_path):
    """Neither a user's folder nor the draft itself, whose masters would be lost."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "note").write_text("a file")
    for place, found in ((tmp_path / "thesis", "chapter.tex"), (folder, "master"), (tmp_path / "note", "something")):
        with pytest.raises(ExportError, match=rf"holds {found}.*give another --output"):
            export_draft(folder, target, place)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    assert (folder / "master" / "model.safetensors").exists() and (tmp_path / "note").read_text() == "a file"


def test_errors(target, folder, tmp_path):
    export_draft(folder, target, tmp_path / "export")
    with pytest.raises(ExportError, match=r"bfloat16 weights and no fp32 masters, torch.float16 was asked for"):
        export_draft(tmp_path / "export", target, tmp_path / "again", FP16)
    with pytest.raises(DraftError, match="holds no draft"):
        export_draft(tmp_path / "absent", target, tmp_path / "again")
    with pytest.raises(DraftError, match="another tokenizer"):
        export_draft(folder, make_target(tokenizer=make_tokenizer(words=70)), tmp_path / "again", FP16)
    with pytest.raises(DraftError, match="vocabulary 98"):
        export_draft(folder, make_target(vocab_size=98), tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "export"}


def test_another_engine_is_refused_before_anything_is_loaded(folder, tmp_path):
    output = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["export", str(folder), "--target", "no/target", "--engine", "tgi", "--output", str(output)]
    )
    assert done.exit_code == 1 and isinstance(done.exception, ExportError) and not output.exists()
    assert "'tgi', expected one of vllm, sglang, tensorrt-llm, llama.cpp" in str(done.exception)


def test_serve_commands(target):
    vllm = serve_command("vllm", target, "out/dir", 3)
    assert vllm.startswith("vllm serve tiny Llama --speculative-config '{") and "--model-impl" not in vllm
    settings = json.loads(vllm.split("'")[1])
    assert settings == {"method": "eagle3", "model": "out/dir", "num_speculative_tokens": 3}
    assert "--model-impl transformers" in serve_command("vllm", make_target("Gemma3"), "out/dir", 3)
    sglang = serve_command("sglang", target, "out/dir", 3)
    assert "--speculative-algorithm EAGLE3 " in sglang and sglang.endswith("--speculative-num-draft-tokens 4")
    assert "-md x/draft.gguf --spec-type draft-eagle3 " in serve_command("llama.cpp", target, "x", 3)
    assert [name for name in ENGINES["eagle3"] if serve_command(name, target, "x", 3) is None] == ["tensorrt-llm"]
