"""GGUF files in llama.cpp's own server: the numbers of transformers, and drafts that it accepts as our loop does."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from drafttrain.evaluate.agreement import decode_one, proposer_as_served
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.export.gguf import FILE, write_gguf
from tests.export.gguf_files import ROWS, RULES, make_target, tokenizer_of
from tests.export.test_gguf import IDS, LLAMA3, sentencepiece
from tests.tiny_drafts import make_batch, make_draft, plain, train
from tests.tiny_models import save
from tests.tiny_students import make_draft as make_small

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
WORKER = Path(__file__).with_name("llama_worker.py")
COUNT, K = 24, 3
TEXT = [(7 * i + 20) % 300 for i in range(24)]
PROMPTS = [[(7 * i + 20 + shift) % 300 for i in range(9)] for shift in range(24)]
STOPS = set(range(9))
"""The tokenizer's special words: at most of them the server ends a text."""
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOWS = ["full_attention", "sliding_attention"] * 4


@pytest.fixture
def ask(python, tmp_path):
    """ask(gguf, [(address, body)], draft) -> replies of a server with that file."""

    def call(path: Path, requests: list, draft: dict | None = None) -> list[dict]:
        job, replies = tmp_path / "job.json", tmp_path / "replies.json"
        job.write_text(json.dumps({"model": str(path), "draft": draft, "requests": requests}))
        done = subprocess.run([python, WORKER, job, replies], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return json.loads(replies.read_text())

    return call


def written(folder: Path, target) -> Path:
    """The target as a GGUF file."""
    save(folder, target.model, target.tokenizer)
    write_gguf(folder, target)
    return folder / FILE


def log_p(ask, path: Path, letter: int) -> np.ndarray:
    """float [T - 1, V]: what follows each prefix of TEXT from its second word on. The server leaves out figures where
    its choice is half a character, so a bias makes it choose a letter; the figures are those without the bias.
    """
    body = {"n_predict": 1, "n_probs": ROWS, "temperature": 0.0, "cache_prompt": False, "logit_bias": [[letter, 1e3]]}
    requests = [["/completion", {"prompt": TEXT[:length], **body}] for length in range(2, len(TEXT) + 1)]
    out = np.full((len(requests), ROWS), np.nan)
    for row, reply in zip(out, ask(path, requests), strict=True):
        for entry in reply["completion_probabilities"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    return out


class HalfGelu(nn.Module):
    """llama.cpp's GELU on a CPU: looked up by the argument in float16, found in float16."""

    def forward(self, x):
        found = nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, found))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {"rope_parameters": YARN, "head_dim": 64}),
        ("Gemma3", {}),
        ("Gemma3", {"layer_types": WINDOWS, "final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    ],
)
def test_small_models_say_what_transformers_says(ask, tmp_path, family, changes):
    target = make_target(family, **changes)
    path = written(tmp_path / "small", target)
    if family == "Gemma3":
        for layer in target.layers:
            layer.mlp.act_fn = HalfGelu()
    with torch.no_grad():
        expected = target.model(torch.tensor([TEXT])).logits[0, 1:].log_softmax(-1).numpy()
    found = log_p(ask, path, target.tokenizer.get_vocab()["a"])
    # A rounding of float16 that falls on the other side is .1% of a number.
    assert np.abs(found - expected).max() < (0.02 if family == "Gemma3" else 1e-4)


@pytest.mark.parametrize(
    ("family", "choices", "changes"),
    [
        ("Llama", {"layers": [0, 4, 7], "ids": IDS}, {}),
        ("Llama", {"hidden_size": 48, "norm_before_residual": True}, {"rope_parameters": LLAMA3}),
        ("Qwen3", {"layers": [1, 4, 6]}, {"head_dim": 16}),
    ],
)
def test_eagle3_is_accepted_as_in_our_loop(ask, tmp_path, family, choices, changes):
    target = make_target(family, **changes)
    choices = dict(choices)
    layers, words = choices.pop("layers", [1, 4, 7]), choices.pop("ids", None)
    prompts = endless(target)
    texts = torch.tensor([prompt + text for prompt, text in zip(prompts, plain(target, prompts, COUNT), strict=True)])
    if words is not None:
        words = torch.unique(torch.cat([words, texts[:4].flatten()]))
    draft = make_draft(target, torch.arange(ROWS) if words is None else words, layers, **choices)
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :9] = False
    train(draft, make_batch(target, texts, mask, layers), 60)
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    export_draft(tmp_path / "draft", target, tmp_path / "export", torch.float32, K, "llama.cpp")
    served(ask, written(tmp_path / "target", target), target, tmp_path / "export", "EAGLE3", least=20)


def test_a_small_draft_is_accepted_as_in_our_loop(ask, tmp_path):
    target = make_target("Qwen3", num_hidden_layers=8)
    draft = make_small(target, layers=(0, 1, 2, 3, 4, 6, 7))
    save_draft(draft, target, tmp_path / "draft", torch.float32)
    export_draft(tmp_path / "draft", target, tmp_path / "export", torch.float32, K, "llama.cpp")
    served(ask, written(tmp_path / "target", target), target, tmp_path / "export", "SIMPLE", least=10)


def endless(target) -> list[list[int]]:
    """Eight prompts after which the target says no special word."""
    texts = plain(target, PROMPTS, COUNT)
    found = [prompt for prompt, text in zip(PROMPTS, texts, strict=True) if STOPS.isdisjoint(text)][:8]
    assert len(found) == 8
    return found


def served(ask, path: Path, target, export: Path, kind: str, least: int) -> None:
    """The same texts with and without the draft as our loop's, in as many rounds."""
    prompts = endless(target)
    body = {"n_predict": COUNT, "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
    requests = [["/completion", {"prompt": prompt, **body}] for prompt in prompts]
    name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}"
    bare, drafted = ask(path, requests), ask(path, requests, {"path": str(export / FILE), "type": name, "k": K})
    proposer = proposer_as_served(export, target)
    ours = [decode_one(target, prompt, proposer, K, COUNT) for prompt in prompts]
    assert [reply["tokens"] for reply in drafted] == [one["tokens"] for one in ours]
    assert [reply["tokens"] for reply in bare] == [one["tokens"] for one in ours]
    accepted = [reply["timings"]["draft_n_accepted"] for reply in drafted]
    print(kind, accepted, [reply["timings"]["draft_n"] for reply in drafted])
    # The server drafts no more than what is left to say, so that all it accepts is said.
    assert accepted == [COUNT - 1 - one["draft_rounds"] for one in ours]
    assert sum(accepted) >= least


@pytest.mark.parametrize("rule", RULES)
def test_texts_are_split_alike(ask, tmp_path, rule):
    tokenizer = tokenizer_of(rule)
    path = written(tmp_path / "small", make_target("Llama", tokenizer, num_hidden_layers=1))
    texts = [
        "the user asked: hello world",
        "  two\n\n lines\t12345 6",
        "we'll see IT'S done<think>hm</think>",
        "é ß 漢字 …",
    ]
    compare(ask, path, tokenizer, texts)


def test_sentencepiece_texts_are_split_alike(ask, tmp_path):
    target = sentencepiece(tmp_path / "target")
    path = written(tmp_path / "small", target)
    compare(ask, path, target.tokenizer, ["a a  aa", " a", "aA a"])


def compare(ask, path: Path, tokenizer, texts: list[str]) -> None:
    requests = [["/tokenize", {"content": text, "add_special": True}] for text in texts]
    for text, reply in zip(texts, ask(path, requests), strict=True):
        assert reply["tokens"] == tokenizer(text)["input_ids"], text
