"""Gemma 3 270M, the demo's model: greedy identity in fp32, features and head, and the whole road once in bf16.

The model comes from its PyPI package (extra `demo`) and is converted into the cache once."""

import json
import math
from pathlib import Path

import pytest
import torch

from drafttrain import demo
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate.cpu_speed import bf16_is_emulated
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.run import evaluate_draft, load_prompts
from drafttrain.export.folder import export_draft
from drafttrain.recipe import DataEntry, parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train

COUNT = 32
LAYERS = [2, 9, 15]
TIE_ULPS = 4
"""bf16: a prefill, a chunk and a single step round differently; a greedy choice this close is a tie."""


@pytest.fixture(scope="module")
def prompt_files(gemma, tmp_path_factory) -> dict[str, Path]:
    """A few of the demo's prompts: code from the standard library."""
    source, folder = demo.prompt_folder(gemma), tmp_path_factory.mktemp("prompts")
    files = {}
    for split, count in {"train": 8, "validation": 2, "test": 4}.items():
        files[split] = folder / f"{split}.jsonl"
        lines = (source / f"{split}.jsonl").read_text().splitlines(keepends=True)
        files[split].write_text("".join(lines[:count]))
    return files


@pytest.fixture(scope="module")
def prompts(gemma, prompt_files) -> list[list[int]]:
    found = load_prompts([DataEntry(path=str(prompt_files["test"]))], gemma, "auto", 4, 0)
    return [list(prompt.ids) for prompt in found]


def tiny_recipe(gemma, files):
    return parse_recipe(
        {
            "method": "eagle3",
            "target": {"name_or_path": str(gemma.folder)},
            "data": {
                **{split: [{"path": str(path)}] for split, path in files.items()},
                "regenerate": {"max_new_tokens": 24, "temperature": [0.0]},
                "draft_vocab": 1024,
            },
            "draft": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512},
            "features": {"source": "store"},
            "training": {
                "bf16": gemma.dtype == torch.bfloat16,
                "max_steps": 10,
                "num_train_epochs": 10,
                "max_tokens_per_batch": 700,
                "learning_rate": 1e-3,
                "warmup_steps": 2,
                "ttt_steps": 3,
                "logging_steps": 1,
                "eval_steps": 5,
                "save_steps": 10,
                "acceptance_new_tokens": 16,
            },
            "evaluation": {"k": [3], "max_new_tokens": 16, "num_prompts": 2},
        }
    )


@pytest.fixture(scope="module")
def run(gemma, prompt_files, tmp_path_factory) -> RunFolder:
    """A finished run: answers, features, ten steps of training, the best draft."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "tiny")
    recipe = tiny_recipe(gemma, prompt_files)
    folder.claim(recipe)
    with folder.lock():
        train(recipe, folder, gemma)
    return folder


def test_the_prompts_are_what_the_model_expects(gemma, prompts):
    emulated = bf16_is_emulated()
    assert gemma.dtype == (torch.float32 if emulated else torch.bfloat16) and len(prompts) == 4
    assert all(prompt.count(gemma.tokenizer.bos_token_id) == 1 == prompt.index(2) + 1 for prompt in prompts)
    assert all(len(prompt) == 49 for prompt in prompts)


def test_training_ran_and_learned(run, gemma):
    log = read_log(run.log)
    losses = [row["loss"] for row in log if "loss" in row]
    assert len(losses) == 10 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    lengths = [row["eval_acceptance_length"] for row in log if "eval_acceptance_length" in row]
    assert len(lengths) >= 2 and all(1 <= length <= 4 for length in lengths)
    manifest = json.loads((run.prepared / "manifest.json").read_text())
    assert manifest["audit"]["train"]["conversations"] == 8 and manifest["coverage"]["train"] == 1.0
    facts = json.loads((run.draft / "drafttrain.json").read_text())
    assert facts["target_fingerprint"] == gemma.fingerprint
    statistics = load_draft(run.draft / "master", gemma).feature_rms
    assert statistics.shape == (3 * 640,) and statistics.max() > 100 * statistics.median()  # the massive activations


def test_the_road_ends_in_a_report_and_an_export_that_proposes_the_same(run, gemma, prompts, tmp_path):
    recipe = run.recipe()
    report = evaluate_draft(run.path, gemma, recipe.evaluation, recipe=recipe)
    _, html = write_report(report, tmp_path / "evaluation", read_log(run.log))
    assert "eagle3 k=3" in html.read_text()
    runs = {one["id"]: one for one in report["runs"]}
    assert set(runs) == {"plain", "n-gram-k3", "untrained-eagle3-k3", "eagle3-k3"}
    for one in report["runs"]:
        assert one["emitted_tokens"] <= 2 * 16 and one["mean_acceptance_length"] >= 1
        assert all(abs(found["ulps"]) <= TIE_ULPS for found in one["divergences"])
    assert runs["eagle3-k3"]["accepted_tokens"] >= runs["untrained-eagle3-k3"]["accepted_tokens"]

    export_draft(run.draft, gemma, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYERS and config["vocab_size"] == gemma.vocab_size == 262144
    assert (config["rope_theta"], config["rope_scaling"], config["max_position_embeddings"]) == (1e6, None, 32768)
    texts = [
        generate(gemma, prompts[:1], load_draft(folder, gemma).proposer(gemma), k=3, max_new_tokens=16)
        for folder in (run.path, tmp_path / "export")
    ]
    assert texts[0].generations == texts[1].generations  # tokens, and counts of what was accepted


@pytest.fixture(scope="module")
def reference(exact, prompts) -> list[list[int]]:
    """transformers' own greedy generation, a prompt at a time."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        done = exact.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=list(exact.stop_ids),
            pad_token_id=0,
        )
        texts.append(done[0, len(prompt) :].tolist())
    return texts


def texts_of(target, prompts, proposer=None, k=1) -> tuple[list[list[int]], int]:
    done = generate(target, prompts, proposer, k=k, max_new_tokens=COUNT)
    return [generation.tokens for generation in done.generations], done.counts.accepted


def test_plain_decoding_is_the_models_own_greedy_text(exact, prompts, reference):
    assert texts_of(exact, prompts)[0] == reference
    assert max(map(len, reference)) == COUNT


@pytest.mark.parametrize(("name", "k"), [("n-gram", 3), ("untrained", 2), ("trained", 1), ("trained", 5)])
def test_speculative_text_is_the_same_in_fp32(exact, prompts, reference, run, name, k):
    folders = {"untrained": run.untrained, "trained": run.draft}
    proposer = NgramProposer() if name == "n-gram" else load_draft(folders[name], exact).proposer(exact)
    texts, accepted = texts_of(exact, prompts, proposer, k)
    assert texts == reference
    assert accepted > 0 or name == "untrained"


def test_features_and_head_in_fp32(exact, prompts):
    """hs[k] against transformers' output_hidden_states; head(hs[n]) against its logits."""
    ids = torch.tensor(prompts)
    n = exact.num_layers
    with torch.no_grad():
        done = exact.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = exact.hidden_states(ids, None, range(n + 1))
    for k in range(n):
        torch.testing.assert_close(
            states[k], done.hidden_states[k], rtol=1e-4, atol=1e-4 * float(states[k].abs().max())
        )
    last = done.hidden_states[n]  # transformers' last entry is behind the final norm
    assert not torch.allclose(states[n], last, rtol=0.1)
    torch.testing.assert_close(exact.final_norm(states[n]), last, rtol=1e-4, atol=1e-4 * float(last.abs().max()))
    logits = exact.head()(states[n])
    assert float((logits - done.logits).abs().max()) < 1e-4 * float(done.logits.abs().max())
    rows = torch.tensor([0, 1, 2, 106, 5000, 262143])
    assert float((exact.head(rows)(states[n]) - done.logits[..., rows]).abs().max()) < 1e-4 * float(logits.abs().max())
