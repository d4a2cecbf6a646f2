"""A small draft cut from Gemma 3 270M: distilled over the whole vocabulary, then served here, quantised, and in
transformers.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafttrain import demo
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.run import load_prompts
from drafttrain.export.folder import export_draft
from drafttrain.recipe import DataEntry, parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train

COUNT = 16
LAYERS = [0, 1, 5, 7, 12, 17]


@pytest.fixture(scope="module")
def prompts(gemma) -> list[list[int]]:
    entry = DataEntry(path=str(demo.prompt_folder(gemma) / "test.jsonl"))
    return [list(prompt.ids) for prompt in load_prompts([entry], gemma, "auto", 2, 0)]


@pytest.fixture(scope="module")
def run(gemma, tmp_path_factory) -> RunFolder:
    """Six steps of distillation on the answers to eight prompts."""
    folder = tmp_path_factory.mktemp("small")
    lines = (demo.prompt_folder(gemma) / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:8]))
    recipe = parse_recipe(
        {
            "method": "kd",
            "target": {"name_or_path": str(gemma.folder)},
            "data": {
                "train": [{"path": str(folder / "train.jsonl")}],
                "regenerate": {"max_new_tokens": 24, "temperature": [0.0]},
            },
            "draft": {"keep_layers": LAYERS},
            "training": {
                "bf16": gemma.dtype == torch.bfloat16,
                "max_steps": 6,
                "num_train_epochs": 10,
                "max_tokens_per_batch": 350,
                "learning_rate": 3e-4,
                "warmup_steps": 1,
                "logging_steps": 1,
            },
        }
    )
    run = RunFolder(folder / "run")
    run.claim(recipe)
    with run.lock():
        train(recipe, run, gemma)
    return run


@pytest.fixture(scope="module")
def reference(exact, prompts) -> list[list[int]]:
    return [g.tokens for g in generate(exact, prompts, max_new_tokens=COUNT, stop_ids=()).generations]


def test_it_learns_over_the_whole_vocabulary(run):
    losses = [row["loss"] for row in read_log(run.log) if "loss" in row]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("quantize", "count"), [(None, 2), ("int8", 1)])
def test_its_text_is_the_targets_own_in_fp32(run, exact, prompts, reference, quantize, count):
    proposer = load_draft(run.path, exact).proposer(exact, quantize=quantize)
    done = generate(exact, prompts[:count], proposer, k=3, max_new_tokens=COUNT, stop_ids=())
    assert [g.tokens for g in done.generations] == reference[:count]
    assert done.counts.drafted > 0


def test_transformers_serves_the_export_with_the_same_text_and_acceptance(run, exact, prompts, reference, tmp_path):
    export_draft(run.draft, exact, tmp_path / "export", torch.float32, k=3)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    passes = []
    handle = exact.model.register_forward_hook(lambda *_: passes.append(1))
    for prompt, expected in zip(prompts, reference, strict=True):
        ids = torch.tensor([prompt])
        done = exact.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=small,
            do_sample=False,
            min_new_tokens=COUNT,
            max_new_tokens=COUNT,
            pad_token_id=0,
        )
        text = done[0, len(prompt) :].tolist()
        assert text == expected or exact.stop_ids[0] in expected  # transformers forbids stops where we ignore them.
    handle.remove()
    draft = load_draft(tmp_path / "export", exact)
    ours = generate(exact, prompts, draft.proposer(exact), k=3, max_new_tokens=COUNT, stop_ids=())
    # transformers drafts once more than needed at the end, and verifies its first token in the same pass as the prompt.
    assert abs(len(passes) - ours.counts.iterations) <= 2 * len(prompts)
