"""GGUF files: every tensor and key by hand or by another reader, and refusals of what llama.cpp would run otherwise."""

import json
import math
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from drafttrain.export.base import ExportError
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.gguf import FILE, write_gguf
from drafttrain.export.gguf_tokenizer import read_sentencepiece, tokenizer_keys
from drafttrain.export.serve import serve_command
from tests.export.gguf_files import ROWS, WORDS, make_target, read, tokenizer_of
from tests.test_target_files import write_tiny_gguf
from tests.tiny_drafts import make_draft
from tests.tiny_models import make_model, make_tokenizer, save

IDS = torch.tensor([0, 1, 2, 5, 9, *range(20, 60), 300])
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


def small(folder, family, dtype=torch.float32, **changes):
    """A small model's folder with draft.gguf; the model that it holds."""
    target = make_target(family, **changes)
    model = target.model.to(dtype)
    save(folder, model, target.tokenizer)
    write_gguf(folder, target)
    return model


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of llama.cpp's order, by index: its row 2i + j of a head of 8 is row i + 4j."""
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(4):
            for j in range(2):
                out[8 * head + i + 4 * j] = rows[8 * head + 2 * i + j]
    return out


def test_every_tensor_and_key_of_a_llama(tmp_path):
    model = small(tmp_path, "Llama", num_hidden_layers=2)
    keys, tensors, types = read(tmp_path)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    parts = {
        **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj"},
        **{"attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"},
        **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    }
    names = {f"blk.{i}.{new}.weight": f"model.layers.{i}.{old}.weight" for new, old in parts.items() for i in range(2)}
    names |= {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {"output.weight": "lm_head.weight"}
    assert tensors.keys() == names.keys() and set(types.values()) == {"F32"}
    for new, old in names.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(new.split(".")[-2])
        found = unpermuted(tensors[new], heads) if heads else tensors[new]
        assert np.array_equal(found, state[old]), new
        assert heads is None or not np.array_equal(tensors[new], state[old])
    assert {key: value for key, value in keys.items() if not key.startswith("tokenizer.")} == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "draft for tiny Llama",
        "general.file_type": 0,
        "llama.vocab_size": ROWS,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.block_count": 2,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 10000.0,
    }


def test_gemma_3(tmp_path):
    """Its norms multiply by 1 + w, its head is the embedding table, its windows are named layer by layer."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    rope = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 777.0}
    model = small(
        tmp_path, "Gemma3", torch.bfloat16, num_hidden_layers=3, layer_types=kinds, rope_parameters=rope,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    keys, tensors, types = read(tmp_path)
    assert keys["general.architecture"] == "gemma3" and keys["general.file_type"] == 32
    for name, old in (("blk.1.attn_q_norm", "layers.1.self_attn.q_norm"), ("output_norm", "norm")):
        weight = model.model.get_submodule(old).weight
        assert types[f"{name}.weight"] == "F32"
        assert np.array_equal(tensors[f"{name}.weight"], weight.float().numpy() + np.float32(1))
    assert types["blk.0.attn_k.weight"] == "BF16" and "output.weight" not in tensors
    assert keys["gemma3.attention.sliding_window"] == 4
    assert keys["gemma3.attention.sliding_window_pattern"] == [False, True, True]
    assert keys["gemma3.rope.freq_base"] == 5e4 and keys["gemma3.rope.freq_base_swa"] == 777.0
    assert (keys["gemma3.rope.scaling.type"], keys["gemma3.rope.scaling.factor"]) == ("linear", 4.0)
    assert keys["gemma3.final_logit_softcapping"] == 3.0
    assert {name.split(".")[2] for name in tensors if name.startswith("blk.2.")} == {
        *("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"),
        *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    }


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
def test_another_reader_has_the_same_model(tmp_path, family):
    """transformers reads GGUF files with code of its own; of Qwen 3 it knows heads of 128 alone."""
    model = small(tmp_path / "small", family, **{"head_dim": 128} if family == "Qwen3" else {}).eval()
    (tmp_path / "alone").mkdir()
    (tmp_path / "small" / FILE).rename(tmp_path / "alone" / FILE)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "alone", gguf_file=FILE, dtype=torch.float32).eval()
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
    tokens = torch.arange(5, 60, 3)[None]
    if family != "Gemma3":  # Its query_pre_attn_scalar is not in a GGUF file, and that reader takes 256.
        with torch.no_grad():
            torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    words = AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file=FILE)
    text = "the user asked hello, 12!"
    assert (
        words(text, add_special_tokens=False)["input_ids"] == tokenizer_of()(text, add_special_tokens=False).input_ids
    )


@pytest.mark.parametrize(("dtype", "kind", "number"), [(torch.bfloat16, "BF16", 32), (torch.float16, "F16", 1)])
def test_matrices_keep_their_numbers_and_vectors_are_float32(tmp_path, dtype, kind, number):
    model = small(tmp_path, "Qwen2", dtype, num_hidden_layers=1)
    keys, tensors, types = read(tmp_path)
    assert keys["general.file_type"] == number
    assert {types[name] for name in types if "norm" in name or name.endswith("bias")} == {"F32"}
    assert {types[name] for name in types if "norm" not in name and not name.endswith("bias")} == {kind}
    expected = model.model.layers[0].mlp.up_proj.weight.view(torch.uint8).numpy()
    assert np.array_equal(tensors["blk.0.ffn_up.weight"].view(np.uint8), expected)
    bias = model.model.layers[0].self_attn.k_proj.bias.float().numpy()
    assert np.array_equal(tensors["blk.0.attn_k.bias"], bias)  # Not reordered: Qwen 2 turns channel i with i + hd/2.


def run_folder(tmp_path, target, dtype=torch.float32, **choices):
    draft = make_draft(target, choices.pop("ids", IDS), choices.pop("layers", [1, 4, 6]), **choices)
    save_draft(draft.requires_grad_(False), target, tmp_path / "draft", dtype)
    return tmp_path / "draft"


def test_eagle3(tmp_path):
    target = make_target(rope_parameters=LLAMA3)
    folder = run_folder(tmp_path, target, norm_before_residual=True)
    export_draft(folder, target, tmp_path / "out", torch.bfloat16, 3, "llama.cpp")
    keys, tensors, types = read(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    names = {
        **{"fc.weight": "fc.weight", "output.weight": "lm_head.weight", "output_norm.weight": "norm.weight"},
        **{"blk.0.attn_norm.weight": "midlayer.input_layernorm.weight"},
        **{"blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight"},
        **{"blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight"},
        **{f"blk.0.attn_{x}.weight": f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"},
        **{"blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight"},
        **{f"blk.0.ffn_{x}.weight": f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    assert tensors.keys() == {*names, "d2t", "rope_freqs.weight"}
    assert types["d2t"] == "I64" and tensors["d2t"].tolist() == IDS.tolist()
    assert types["fc.weight"] == "BF16" and types["blk.0.attn_norm_2.weight"] == "F32"
    for new, old in names.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(new.split(".")[-2])
        expected = found[old].float().numpy() if found[old].ndim == 1 else found[old].view(torch.uint8).numpy()
        rows = tensors[new].view(np.uint8) if found[old].ndim == 2 else tensors[new]
        assert np.array_equal(unpermuted(rows, heads) if heads else rows, expected), new
    assert keys["general.architecture"] == "eagle3" and keys["eagle3.target_layers"] == [1, 4, 6]
    assert keys["eagle3.target_hidden_size"] == 32 and keys["eagle3.norm_before_residual"] is True
    assert keys["eagle3.block_count"] == 1 and keys["eagle3.vocab_size"] == ROWS
    assert len(keys["tokenizer.ggml.tokens"]) == ROWS
    # Wavelengths above 32 / 1 are stretched by 8, below 32 / 4 kept, between them as llama3 says.
    lengths = [2 * math.pi * 500.0 ** (2 * i / 8) for i in range(4)]
    factors = []
    for length in lengths:
        share = (32 / length - 1) / 3
        factors.append(1.0 if length < 8 else 8.0 if length > 32 else 1 / ((1 - share) / 8 + share))
    assert len(set(factors)) == 3
    assert tensors["rope_freqs.weight"].tolist() == pytest.approx(factors, rel=1e-5)


def test_eagle3_of_another_width_or_every_word(tmp_path):
    target = make_target()
    for name, choices in (("wide", {"hidden_size": 48}), ("every", {"ids": torch.arange(ROWS)})):
        (tmp_path / name).mkdir()
        folder = run_folder(tmp_path / name, target, **choices)
        export_draft(folder, target, tmp_path / name / "out", None, 3, "llama.cpp")
    keys, tensors, _ = read(tmp_path / "wide" / "out")
    assert tensors["token_embd.weight"].shape == (ROWS, 48)
    assert (keys["eagle3.embedding_length"], keys["eagle3.target_hidden_size"]) == (48, 32)
    _, tensors, _ = read(tmp_path / "every" / "out")
    assert "d2t" not in tensors and tensors["output.weight"].shape[0] == ROWS


def test_tokenizer_keys():
    tokenizer = tokenizer_of("qwen2")
    keys = tokenizer_keys(make_target(tokenizer=tokenizer), ROWS)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == ROWS
    assert tokens[:3] == ["<bos>", "</s>", "<|im_end|>"] and kinds[:9] == [3] * 9
    assert all(tokenizer.get_vocab()[text] == i for i, text in enumerate(tokens[:WORDS]))
    assert tokens[WORDS - 2 :] == ["<think>", "</think>", *(f"[PAD{i}]" for i in range(WORDS, ROWS))]
    assert kinds[WORDS - 2 :] == [4, 4, *[5] * (ROWS - WORDS)] and set(kinds[9 : WORDS - 2]) == {1}
    assert len(keys["tokenizer.ggml.merges"]) == 40 and {"h e", "1 2"} < set(keys["tokenizer.ggml.merges"])
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.add_eos_token"] is False
    assert keys["tokenizer.chat_template"] == tokenizer.chat_template
    assert "tokenizer.ggml.padding_token_id" not in keys
    bare = tokenizer_keys(make_target(tokenizer=tokenizer_of(adds_bos=False)), ROWS)
    assert bare["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_splitting_rules_have_names(rule):
    assert tokenizer_keys(make_target(tokenizer=tokenizer_of(rule)), ROWS)["tokenizer.ggml.pre"] == rule


def changed(kind):
    tokenizer = tokenizer_of("llama-bpe")
    inner = tokenizer.backend_tokenizer
    if kind == "other split":
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind == "merges first":
        inner.model.ignore_merges = False
    elif kind == "spaces":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        inner.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize("kind", ["other split", "merges first", "spaces", "lower case"])
def test_rules_that_llama_cpp_does_not_have_are_refused(kind):
    with pytest.raises(ExportError, match=r"splits text by .*Mend: give the target as a \.gguf file.*convert_hf"):
        tokenizer_keys(make_target(tokenizer=changed(kind)), ROWS)


def test_other_tokenizers_are_refused():
    with pytest.raises(ExportError, match="is of type WordLevel"):
        tokenizer_keys(make_target(tokenizer=make_tokenizer()), ROWS)
    with pytest.raises(ExportError, match="has no tokenizer"):
        tokenizer_keys(make_target_without_tokenizer(), ROWS)
    with pytest.raises(ExportError, match="has 307 words, the draft 300"):
        tokenizer_keys(make_target(), 300)


def make_target_without_tokenizer():
    target = make_target()
    target.tokenizer = None
    return target


def test_a_gguf_target_gives_its_own_keys(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", make_model("Qwen2"))
    target = make_target("Qwen2")
    target.name = str(tmp_path / "tiny.gguf")
    keys = tokenizer_keys(target, 104)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    original = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    assert keys.keys() == original.keys() and keys["tokenizer.ggml.merges"] == ["a b", "c d"]
    assert keys["tokenizer.ggml.tokens"] == [*original["tokenizer.ggml.tokens"], *(f"[PAD{i}]" for i in range(99, 104))]
    assert keys["tokenizer.ggml.token_type"] == [*original["tokenizer.ggml.token_type"], *[5] * 5]


def field(number, value):
    """One field of a protocol buffer: a varint below 128, a float, or bytes."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3 | 2, len(value)]) + value


PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("<0x41>", 0.0, 6),
    ("\u2581", -1.5, 1),
    ("a", -2.0, 1),
    ("\u2581a", -0.5, 1),
]


def sentencepiece(folder, model_type=2, pieces=PIECES):
    """A target with a SentencePiece tokenizer and its tokenizer.model."""
    data = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + (field(3, kind) if kind != 1 else b""))
        for text, score, kind in pieces
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(data + field(2, field(3, model_type) + field(4, 100)))
    vocabulary = {text: i for i, (text, _, _) in enumerate(PIECES)}
    inner = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.add_special_tokens(["<unk>", "<s>"])
    target = make_target(tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>"))
    target.folder = folder
    return target


def test_sentencepiece(tmp_path):
    target = sentencepiece(tmp_path / "target")
    assert read_sentencepiece((target.folder / "tokenizer.model").read_bytes()) == (PIECES, 2)
    keys = tokenizer_keys(target, 8)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("llama", "default")
    assert keys["tokenizer.ggml.tokens"][:6] == [text for text, _, _ in PIECES]
    assert keys["tokenizer.ggml.scores"] == [-1000.0, -1000.0, 0.0, -1.5, -2.0, -0.5, -1000.0, -1000.0]
    assert keys["tokenizer.ggml.token_type"] == [3, 3, 6, 1, 1, 1, 5, 5]
    assert keys["tokenizer.ggml.add_space_prefix"] is False and keys["tokenizer.ggml.unknown_token_id"] == 0
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    target.tokenizer.backend_tokenizer.normalizer = normalizer
    assert tokenizer_keys(target, 8)["tokenizer.ggml.add_space_prefix"] is True


def test_sentencepiece_without_its_file_or_with_another(tmp_path):
    with pytest.raises(ExportError, match="no BPE model"):
        tokenizer_keys(sentencepiece(tmp_path / "unigram", model_type=1), 8)
    other = [*PIECES[:5], ("b", -0.5, 1)]
    with pytest.raises(ExportError, match="holds other words than tiny Llama's"):
        tokenizer_keys(sentencepiece(tmp_path / "other", pieces=other), 8)
    target = sentencepiece(tmp_path / "target")
    (target.folder / "tokenizer.model").unlink()
    with pytest.raises(ExportError, match=r"no tokenizer\.model.*\.gguf file"):
        tokenizer_keys(target, 8)


REFUSED = {
    "family": ("Gemma2", {}, r"type 'gemma2'. draft.gguf is written for llama, qwen2, qwen3, gemma3_text.*convert_hf"),
    "window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "sliding windows"),
    "bias": ("Qwen3", {"attention_bias": True}, r"self_attn\.o_proj\.bias has no place|_proj\.bias has no place"),
    "scale": ("Gemma3", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar 16"),
    "heads": ("Qwen2", {"head_dim": 16}, "heads of 16"),
    "activation": ("Llama", {"hidden_act": "gelu"}, "activation gelu"),
    "rope": ("Qwen3", {"rope_parameters": LLAMA3}, "rope_type is 'llama3'.*Expected default, linear, yarn"),
    "yarn": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.5}}, "rope scaling has attention_factor,"),
    "edges": ("Llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 1.0}}, "rope scaling has beta_fast,"),
}


def test_yarn(tmp_path):
    small(tmp_path, "Qwen3", rope_parameters=YARN | {"beta_fast": 32.0})
    found = {name.removeprefix("qwen3.rope.scaling."): value for name, value in read(tmp_path)[0].items()}
    assert (found["type"], found["factor"], found["original_context_length"]) == ("yarn", 4.0, 64)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_llama_cpp_would_run_otherwise_are_refused(tmp_path, name):
    family, changes, message = REFUSED[name]
    with pytest.raises(ExportError, match=message):
        small(tmp_path, family, **changes)


def test_nothing_is_left_of_a_refused_export(tmp_path):
    """Targets whose states llama.cpp does not hand out, states it has no name for, tokenizers it does not know."""
    cases = {
        "gemma": (make_target("Gemma3"), {}, "is a gemma3_text model. llama.cpp hands out"),
        "qwen2": (make_target("Qwen2"), {}, "is a qwen2 model"),
        "last": (make_target(), {"layers": [1, 4, 8]}, r"reads hs\[8\] of a target of 8 layers"),
        "words": (make_target(tokenizer=make_tokenizer()), {}, "is of type WordLevel"),
    }
    for name, (target, choices, message) in cases.items():
        (tmp_path / name).mkdir()
        folder = run_folder(tmp_path / name, target, **choices)
        with pytest.raises(ExportError, match=message):
            export_draft(folder, target, tmp_path / name / "out", None, 3, "llama.cpp")
        assert [path.name for path in (tmp_path / name).iterdir()] == ["draft"]


def test_an_export_replaces_a_former_one_and_others_do_not_take_the_file_along(tmp_path):
    target = make_target()
    folder = run_folder(tmp_path, target)
    for _ in range(2):
        export_draft(folder, target, tmp_path / "out", None, 3, "llama.cpp")
    assert (tmp_path / "out" / FILE).exists() and (tmp_path / "out" / "model.safetensors").exists()
    export_draft(tmp_path / "out", target, tmp_path / "vllm")
    assert not (tmp_path / "vllm" / FILE).exists()


def test_the_verb(tmp_path, cli):
    target = make_target()
    save(tmp_path / "target", target.model, target.tokenizer)
    folder = run_folder(tmp_path, target)
    out = tmp_path / "out"
    arguments = ["export", folder, "--target", tmp_path / "target", "--engine", "llama.cpp", "--output", out, "--json"]
    status, text, _ = cli(*arguments, "--dtype", "float16")
    assert status == 0
    assert json.loads(text)["command"] == (
        f"llama-server -m TARGET.gguf -md {out}/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 3 "
        "--spec-draft-p-min 0"
    )
    assert set(read(out)[2].values()) == {"F16", "F32", "I64"}
    target.name = "models/target.gguf"
    command = serve_command("llama.cpp", target, out, 4, "kd")
    assert command.startswith("llama-server -m models/target.gguf -md ") and "--spec-type draft-simple" in command
