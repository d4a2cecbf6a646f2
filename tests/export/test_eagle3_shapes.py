"""The EAGLE-3 directory of other shapes than the plain one: names, config keys, round trips, and which engines would
serve something else."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.loading import load_draft
from drafttrain.export.base import ExportError
from drafttrain.export.eagle3 import check_engine, write_eagle3
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.nn.sampling import Sampling
from tests.drafts.test_eagle3 import parity_error
from tests.drafts.test_eagle3_shapes import EVERYTHING, SHAPES
from tests.export.test_eagle3 import BF16, FP16, FP32, IDS, config_of, content, folded, proposals
from tests.tiny_drafts import features_of, make_draft, make_target
from tests.tiny_models import V, make_tokenizer, tokens


@pytest.fixture(scope="module")
def target():
    return make_target(tokenizer=make_tokenizer())


def test_names_and_shapes_of_everything(target, tmp_path):
    """FORMATS: fc_norm.{i} of the target's size, layers behind the first as vLLM names and builds them, own table."""
    write_eagle3(make_draft(target, IDS, **EVERYTHING), target, tmp_path, BF16)
    H, Ht, I, A, q, kv, Vd = 24, 32, 48, 3, 4 * 8, 2 * 8, len(IDS)  # noqa: E741
    expected = {"embed_tokens.weight": (V, H), "fc.weight": (H, A * Ht), "norm.weight": (H,), "lm_head.weight": (Vd, H)}
    expected |= {f"fc_norm.{i}.weight": (Ht,) for i in range(A)} | {"d2t": (Vd,), "t2d": (V,)}
    expected["input_norm.weight"] = (A * Ht,)
    for layer, width in (("midlayer", 2 * H), ("layers.1", H), ("layers.2", H)):
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == "midlayer" else [])]
        expected |= {f"{layer}.{name}.weight": (H,) for name in norms}
        expected |= {
            f"{layer}.self_attn.{name}_proj.weight": (rows, width)
            for name, rows in zip("qkv", (q, kv, kv), strict=True)
        }
        expected |= {f"{layer}.self_attn.o_proj.weight": (H, q), f"{layer}.mlp.down_proj.weight": (H, I)}
        expected |= {f"{layer}.mlp.{name}_proj.weight": (I, H) for name in ("gate", "up")}
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    assert {t.dtype for t in stored.values()} == {BF16, torch.int64, torch.bool}


def test_config_keys(target, tmp_path):
    for name, switches in SHAPES.items():
        folder = tmp_path / name
        folder.mkdir()
        draft = make_draft(target, IDS, **switches)
        write_eagle3(draft, target, folder, BF16)
        found, layers = config_of(folder), switches.get("layers", [1, 4, 6])
        for key in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"):
            assert found[key] is switches.get(key, False)
        assert found["eagle_config"]["norm_before_fc"] is found["norm_before_fc"]
        assert found["num_hidden_layers"] == switches.get("num_hidden_layers", 1)
        assert (found["hidden_size"], found["target_hidden_size"]) == (switches.get("hidden_size", 32), 32)
        assert (found["num_aux_hidden_states"], found["eagle_aux_hidden_state_layer_ids"]) == (len(layers), layers)
        assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in layers]
        window = switches.get("sliding_window")
        assert ("sliding_window" in found, "layer_types" in found) == ((window is not None,) * 2)
        read = LlamaConfig(**found)  # As an engine reads it.
        assert window is None or (read.sliding_window, set(read.layer_types)) == (window, {"sliding_attention"})
        stored = load_file(folder / "model.safetensors")
        assert ("embed_tokens.weight" in stored) == ("hidden_size" in switches or "train_embeddings" in switches)
        assert load_draft(folder, target).shape == draft.shape


@pytest.mark.parametrize("name", ["eagle-3.1", "everything", "own embeddings", "one feature"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_memory_folder_and_export_propose_the_same_bit_for_bit(target, tmp_path, name, dtype):
    draft = make_draft(target, IDS, **SHAPES[name]).requires_grad_(False)
    save_draft(draft, target, tmp_path / "draft", dtype)
    export_draft(tmp_path / "draft", target, tmp_path / "export")
    assert content(tmp_path / "export") == content(tmp_path / "draft")
    reference = proposals(folded(draft, target, dtype), target, Sampling(), 3)
    for folder in (tmp_path / "draft", tmp_path / "export"):
        found = proposals(load_draft(folder, target), target, Sampling(), 3)
        assert found[:2] == reference[:2]
        assert all(torch.equal(a, b) for a, b in zip(found[2], reference[2], strict=True))
    export_draft(tmp_path / "draft", target, tmp_path / "again", FP16)
    assert load_draft(tmp_path / "again", target).shape == draft.shape
    masters = Eagle3Draft.from_pretrained(tmp_path / "draft" / "master")
    assert masters.shape == draft.shape
    assert all(torch.equal(tensor, draft.state_dict()[key]) for key, tensor in masters.state_dict().items())


@pytest.mark.parametrize("name", ["eagle-3.1", "everything"])
def test_cached_drafting_of_a_reloaded_export_is_its_own_training_time_unroll(target, tmp_path, name):
    save_draft(make_draft(target, IDS, **SHAPES[name]), target, tmp_path / "draft", FP32)
    export_draft(tmp_path / "draft", target, tmp_path / "export")
    assert parity_error(target, load_draft(tmp_path / "export", target)) < 1e-4


@pytest.mark.parametrize("switch", ["fc_norm", "norm_before_fc"])
def test_the_export_with_norms_before_fc_is_the_trained_draft_in_fp32(target, tmp_path, switch):
    """Behind the norms the scale folds into fc whatever it is; in front of them no fold gives the same function."""
    draft = make_draft(target, IDS, **{switch: True}).requires_grad_(False)
    draft.feature_rms.copy_(torch.logspace(-2, 4, 96))
    write_eagle3(draft, target, tmp_path, FP32)
    exported = load_draft(tmp_path, target)
    assert exported.feature_rms.eq(1).all()
    ids = tokens(2, 12)
    features = features_of(target, ids)
    for mine, theirs in zip(exported.unroll(ids, features, 3), draft.unroll(ids, features, 3), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    stored = load_file(tmp_path / "model.safetensors")
    norms = {name for name in stored if name.startswith(("fc_norm", "input_norm"))}
    assert norms
    for name in norms:
        assert torch.equal(stored[name], draft.state_dict()[name])
    in_front = copy.deepcopy(draft).attach(target)
    in_front.feature_rms.fill_(1)
    other = in_front.fuse(features / draft.feature_rms)
    assert float((other - draft.fuse(features)).abs().max()) > 0.1 * float(other.abs().max())


def test_engines_that_would_serve_another_draft_are_refused(target, tmp_path):
    cases = [
        ("llama.cpp", {"fc_norm": True, "norm_output": True}, "fc_norm .*; norm_output "),
        ("llama.cpp", {"norm_before_fc": True}, "norm_before_fc .*no name for that norm"),
        ("llama.cpp", {"layers": [2, 5]}, "features.layers .*it reads three layers"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual .*it ignores that"),
        ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers"),
        ("sglang", {"train_embeddings": True}, "train_embeddings .*it puts the target's embeddings"),
        ("tensorrt-llm", {"sliding_window": 8}, "sliding_window .*it knows no window"),
        ("tensorrt-llm", {"layers": [0, 2, 5]}, "it counts layers from"),
    ]
    for i, (engine, switches, message) in enumerate(cases):
        folder = tmp_path / str(i)
        save_draft(make_draft(target, IDS, **switches), target, folder / "draft", BF16)
        with pytest.raises(ExportError, match=rf"{message}.*Mend: --engine vllm"):
            export_draft(folder / "draft", target, folder / "out", engine=engine)
        assert not (folder / "out").exists()
        export_draft(folder / "draft", target, folder / "out", engine="vllm")
    for engine, switches in (
        ("sglang", {"fc_norm": True, "norm_output": True, "hidden_size": 24, "layers": [1, 2, 3, 5]}),
        ("llama.cpp", {"train_embeddings": True, "norm_before_residual": True}),
        ("vllm", EVERYTHING),
    ):
        check_engine(engine, make_draft(target, IDS, **switches).shape)


def test_another_layout_leaves_in_the_engines_form(target, tmp_path):
    """SafeAILab's file is served as its own numbers, under the config that engines read."""
    draft = make_draft(target, IDS, layers=[2, 4, 5]).requires_grad_(False)
    draft.feature_rms.fill_(1)
    state = {name: t.half() if t.is_floating_point() else t for name, t in draft.state_dict().items()}
    del state["feature_rms"]
    (tmp_path / "theirs").mkdir()
    torch.save(state, tmp_path / "theirs" / "pytorch_model.bin")
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "draft_vocab_size",
    )
    values = {"architectures": ["LlamaForCausalLM"], **{name: getattr(draft.shape, name) for name in sizes}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values))
    export_draft(tmp_path / "theirs", target, tmp_path / "out")
    write_eagle3(load_draft(tmp_path / "theirs", target), target, tmp_path, FP16)
    assert content(tmp_path / "out") == content(tmp_path)
    assert config_of(tmp_path)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["fc.weight"], state["fc.weight"])
