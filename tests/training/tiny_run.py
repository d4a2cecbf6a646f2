"""A tiny target on disk, prompts and a recipe for it: a whole run takes about a second."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import yaml

from drafttrain.data.prepare import Prepared, prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.loading import new_draft
from drafttrain.recipe import Recipe, parse_recipe
from drafttrain.target import Target, load_target
from drafttrain.training.selection import Acceptance
from drafttrain.training.trainer import DraftTrainer
from tests.tiny_models import make_model, make_tokenizer, save

POSITIONS = 128


def write_target(folder: Path, family: str = "Llama", words: int = 90, **changes) -> Path:
    """A target folder: tiny random model and word-level tokenizer."""
    return save(folder, make_model(family, **{"max_position_embeddings": POSITIONS} | changes), make_tokenizer(words))


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(80)}" for _ in range(count))


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_rows(count: int, seed: int, longest: int = 12) -> list[dict]:
    rng = random.Random(seed)
    return [{"prompt": words(rng, rng.randrange(3, longest))} for _ in range(count)]


def text_rows(count: int, seed: int, longest: int = 24) -> list[dict]:
    rng = random.Random(seed)
    return [{"text": words(rng, rng.randrange(6, longest))} for _ in range(count)]


def settings(folder: Path, **training) -> dict:
    """A recipe on text rows (no answers to generate), in fp32; files are written into `folder` where missing."""
    if not (folder / "target").exists():
        write_target(folder / "target")
    for split, count in (("train", 24), ("validation", 6)):
        if not (folder / f"{split}.jsonl").exists():
            write_rows(folder / f"{split}.jsonl", text_rows(count, seed=count))
    if not (folder / "test.jsonl").exists():
        write_rows(folder / "test.jsonl", prompt_rows(3, seed=5))
    base = {
        "bf16": False,
        "max_tokens_per_batch": 128,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_steps": 4,
        "save_steps": 4,
        "ttt_steps": 3,
    }
    if training.get("select_by") != "loss":
        base |= {"acceptance_prompts": 3, "acceptance_new_tokens": 8}
    return {
        "method": "eagle3",
        "target": {"name_or_path": str(folder / "target"), "dtype": "float32"},
        "data": {
            **{split: [{"path": str(folder / f"{split}.jsonl")}] for split in ("train", "validation", "test")},
            "draft_vocab": 60,
        },
        "features": {"dtype": "float32"},
        "training": base | training,
        "evaluation": {"k": [2], "max_new_tokens": 8},
        "export": {"dtype": "float32"},
    }


def make_recipe(folder: Path, **training) -> Recipe:
    return parse_recipe(settings(folder, **training), folder)


def write_recipe(folder: Path, values: dict, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return path


def make_target(recipe: Recipe) -> Target:
    return load_target(**recipe.target.model_dump())


def open_run(path: Path, recipe: Recipe) -> RunFolder:
    run = RunFolder(path)
    run.claim(recipe)
    return run


def make_trainer(
    recipe: Recipe, run: RunFolder, target: Target, on_best=None, rows: dict | None = None
) -> tuple[DraftTrainer, Prepared]:
    """A trainer on a fresh draft, as `drafttrain.training.run.train` makes one, without the gate."""
    prepared = prepare(recipe, run, target, say=lambda message: None)
    draft = new_draft(recipe, target, prepared.layers, prepared.vocab.ids, prepared.statistics, prepared.kept_layers)
    sources = {split: prepared.source(recipe, target, split) for split in prepared.rows}
    rows = rows or prepared.rows
    acceptance = Acceptance.of(recipe.training, target, rows)
    return DraftTrainer(draft, recipe.training, run, rows, sources, on_best, acceptance=acceptance), prepared
