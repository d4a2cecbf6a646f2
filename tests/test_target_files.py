"""GGUF conversion, the hub and its cache, and every error that a target's files can cause."""

import functools
import hashlib
import http.server
import json
import sys
import threading
import time
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafttrain import target_files
from drafttrain.errors import UserError
from drafttrain.target import Target, TargetError, load_target
from drafttrain.target_files import convert_gguf
from tests.tiny_models import N, V, make_model, save, tokens


def write_tiny_gguf(path, model) -> None:
    """A float32 Qwen2 GGUF with a byte-level BPE vocabulary, named as llama.cpp names things."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<bos>", "<eos>", *(chr(33 + i) for i in range(94)), "ab", "cd"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (V - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", parameter.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny_gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    model = make_model("Qwen2")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    (tmp_path / "models").mkdir()
    write_tiny_gguf(tmp_path / "models" / "tiny.gguf", model)
    return tmp_path / "models" / "tiny.gguf", model


def test_gguf_is_converted_once(tiny_gguf):
    path, model = tiny_gguf
    target = load_target(str(path), device="cpu", attn_implementation="eager")
    assert target.dtype == torch.bfloat16 and target.stop_ids == (2,)
    assert "quantization_config" not in json.loads((target.folder / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(target.folder).num_parameters() == model.num_parameters()
    expected = model(input_ids=tokens()).logits
    torch.testing.assert_close(target.head()(target.hidden_states(tokens(), None, [N])[N]), expected)
    assert [entry.name for entry in target.folder.parent.iterdir()] == [target.folder.name]
    written = (target.folder / "model.safetensors").stat().st_mtime_ns
    again = load_target(str(path.parent), gguf_file=path.name, device="cpu")
    assert again.folder == target.folder and again.fingerprint == target.fingerprint
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_second_gguf_conversion_waits_for_the_first(tiny_gguf, monkeypatch):
    path, _ = tiny_gguf
    calls, inside = [], threading.Event()

    def slow(path, beside):
        calls.append(path)
        inside.set()
        time.sleep(0.5)
        (beside / "config.json").write_text("{}")

    monkeypatch.setattr(target_files, "write_dequantized", slow)
    first = threading.Thread(target=convert_gguf, args=(path,))
    first.start()
    assert inside.wait(10)
    folder = convert_gguf(path)
    first.join()
    assert calls == [path]
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_interrupted_gguf_conversion_leaves_nothing(tiny_gguf, monkeypatch):
    path, _ = tiny_gguf

    def fail_half_way(path, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(target_files, "write_dequantized", fail_half_way)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(path)
    assert list((path.parent.parent / "cache" / "gguf").iterdir()) == []


def test_gguf_without_the_gguf_package(tiny_gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(TargetError, match=r"pip install drafttrain\[gguf\]"):
        load_target(str(tiny_gguf[0]))


def test_gguf_files_that_are_none(tmp_path):
    with pytest.raises(TargetError, match="No GGUF file"):
        load_target(str(tmp_path / "absent.gguf"))
    with pytest.raises(TargetError, match="No GGUF file"):
        load_target(str(tmp_path), gguf_file="absent.gguf")
    with pytest.raises(TargetError, match="not a folder"):
        load_target("some/model", gguf_file="absent.gguf")
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(TargetError, match="GGUF magic"):
        load_target(str(tmp_path / "page.gguf"))
    with pytest.raises(TargetError, match=r"target\.gguf_file: page\.gguf"):
        load_target(str(tmp_path))


def test_broken_gguf(tiny_gguf):
    path, _ = tiny_gguf
    content = path.read_bytes()
    for size in (8, 300, 3000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(TargetError, match="the GGUF file cannot be loaded"):
            load_target(str(path))
    assert list((path.parent.parent / "cache" / "gguf").iterdir()) == []


def test_hub_out_of_reach_ends_in_seconds(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(TargetError, match="cannot be reached"):
        load_target("nobody/no-such-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TargetError, match="HF_HUB_OFFLINE"):
        load_target("nobody/no-such-model")
    assert time.perf_counter() - started < 6


def test_hub_out_of_reach_takes_the_cached_model(monkeypatch, tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    save(snapshot, make_model("Llama"))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    target = load_target("some/model", device="cpu")
    assert target.folder == snapshot and target.name == "some/model"
    assert target.fingerprint == load_target(str(snapshot), device="cpu").fingerprint


class FakeHub(http.server.SimpleHTTPRequestHandler):
    """Answers as the hub does for one model, some/model, whose files lie in the served folder."""

    commit = "1" * 40

    def do_GET(self):
        if self.path.startswith("/api/models/some/model/revision/"):
            files = [{"rfilename": path.name} for path in Path(self.directory).iterdir()]
            return self.answer(json.dumps({"id": "some/model", "sha": self.commit, "siblings": files}).encode())
        if self.path.startswith("/api/models/some/model/tree/"):
            files = [(path.name, path.stat().st_size) for path in Path(self.directory).iterdir()]
            listing = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in files]
            return self.answer(json.dumps(listing).encode())
        if self.path.startswith("/some/model/resolve/"):
            return self.answer((Path(self.directory) / self.path.rpartition("/")[2]).read_bytes())
        return self.answer(b'{"error": "Repository not found"}', status=404)

    do_HEAD = do_GET

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    folder = tmp_path / "served"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(FakeHub, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_id_is_downloaded_and_then_read_like_a_folder(fake_hub):
    save(fake_hub, make_model("Llama"))
    (fake_hub / "pytorch_model.bin").write_bytes(b"not wanted")
    target = load_target("some/model", device="cpu")
    assert target.folder.name == FakeHub.commit and not (target.folder / "pytorch_model.bin").exists()
    assert target.fingerprint == load_target(str(fake_hub), device="cpu").fingerprint


def test_hub_id_that_is_no_target_is_refused_before_its_weights_come(fake_hub, tmp_path):
    save(fake_hub, make_model("Llama"))
    (fake_hub / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(TargetError, match="does not generate text"):
        load_target("some/model")
    assert list((tmp_path / "cache").rglob("config.json")) and not list((tmp_path / "cache").rglob("*.safetensors"))
    with pytest.raises(TargetError, match="check the spelling, set HF_TOKEN"):
        load_target("some/other-model")


def test_paths_that_are_no_target(tmp_path):
    for path in (tmp_path / "absent", "./absent", "a/b/c"):
        with pytest.raises(TargetError, match="no such folder"):
            load_target(str(path))
    with pytest.raises(TargetError, match=r"no config\.json"):
        load_target(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TargetError, match="merge"):
        load_target(str(tmp_path))
    with pytest.raises(TargetError, match="is a file"):
        load_target(str(tmp_path / "adapter_config.json"))
    assert issubclass(TargetError, UserError)


def test_weights_that_are_missing_or_broken(tmp_path):
    save(tmp_path, make_model("Llama"))
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    state = load_file(weights)
    state.pop("model.layers.3.mlp.up_proj.weight")
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 .*model\.layers\.3\.mlp\.up_proj\.weight"):
        load_target(str(tmp_path), device="cpu")
    for size in (5, 100, len(content) - 50):
        weights.write_bytes(content[:size])
        with pytest.raises(TargetError, match=r"not a complete safetensors|weights cannot be loaded"):
            load_target(str(tmp_path), device="cpu")
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(TargetError, match=r"only pytorch_model\.bin.*save_pretrained"):
        load_target(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(TargetError, match="no weight files"):
        load_target(str(tmp_path))


def test_a_shard_is_missing(tmp_path):
    save(tmp_path, make_model("Llama"), max_shard_size="20KB")
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(TargetError, match=r"lacks 1 of the \d+ weight files .*model-00001"):
        load_target(str(tmp_path))


def test_tokenizer_is_missing(tmp_path):
    make_model("Llama").save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="the tokenizer cannot be loaded"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM, which does not generate"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "does not generate text"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal|encoder-decoder"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}, "upgrade transformers"),
        (
            {"model_type": "nonesuch", "auto_map": {"AutoConfig": "configuration.Nonesuch"}},
            r"target\.trust_remote_code: true",
        ),
    ],
)
def test_architectures_that_are_no_target(tmp_path, changes, message):
    save(tmp_path, make_model("Llama"))
    (tmp_path / "config.json").write_text(json.dumps(changes))
    with pytest.raises(TargetError, match=message):
        load_target(str(tmp_path))


def test_broken_config(tmp_path):
    save(tmp_path, make_model("Llama"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TargetError, match=r"config\.json cannot be loaded"):
        load_target(str(tmp_path))


def test_a_decoder_without_the_usual_stack():
    config = transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=N, n_head=4)
    with pytest.raises(TargetError, match="GPT2LMHeadModel has no decoder stack"):
        Target.from_model(transformers.GPT2LMHeadModel(config))


def test_an_unknown_logit_transform_is_refused():
    model = make_model("Llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(TargetError, match="do not reproduce its logits"):
        Target.from_model(model)
    model = make_model("Llama")
    model.model.layers[3].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(TargetError, match="Expected finite"):
        Target.from_model(model)


def test_dtype_and_device_that_do_not_exist(tmp_path):
    save(tmp_path, make_model("Llama"))
    with pytest.raises(TargetError, match=r"target\.dtype is 'int3'"):
        load_target(str(tmp_path), dtype="int3")
    for device in ("cuda:99", "toaster"):
        with pytest.raises(TargetError, match=r"target\.device"):
            load_target(str(tmp_path), device=device)
