"""Every kind of draft for Gemma 3 270M on the same answers and the same minutes of training, in one table.

    python scripts/bench_methods.py --output checkpoints/bench-methods

EAGLE-3, Medusa heads (with their calibrated tree), sequential heads and a small model (six of the target's layers) see
the target's own answers to 512 prompts from the standard library (8,192 draft words, the small model all), each for the
given minutes on this machine; features are stored before the clock starts. Then all of them and n-gram lookup draft for
the same held-out prompts, at T = 0 and 0.8: acceptance length, speedup, paired differences, in `drafttrain compare`'s
report. Medusa heads are trained with three seeds, which a second, greedy report compares. What is done is kept: run
again to go on; --only NAME trains some.
Alone on two CPU cores: six times --minutes, and half an hour.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_kd import PROMPTS, SPLITS, base_settings, check_only, recipe_of, run_variant
from rich.console import Console
from rich.table import Table

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunFolder
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import write_prompts
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.run import compare_drafts, settings_with
from drafttrain.recipe import Recipe
from drafttrain.target import Target
from drafttrain.training.callbacks import read_log

SEEDS = (0, 1, 2)


def variants() -> dict[str, dict[str, Any]]:
    """{name: {section: changed settings}}."""
    words = {"data": {"draft_vocab": 8192}}
    eagle = {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64, "intermediate_size": 2048}
    medusa = {**words, "method": "medusa", "draft": {"num_heads": 4}}
    out = {
        "eagle3": {
            **words,
            "method": "eagle3",
            "draft": eagle,
            "training": {"learning_rate": 1e-3, "warmup_steps": 40, "ttt_steps": 3},
        }
    }
    for seed in SEEDS:
        name = "medusa" if seed == 0 else f"medusa-seed{seed}"
        out[name] = {**medusa, "training": {"learning_rate": 1e-3, "warmup_steps": 40, "seed": seed}}
    sequential = {**medusa, "draft": {"num_heads": 4, "sequential": True}}
    out["medusa-sequential"] = {**sequential, "training": {"learning_rate": 1e-3, "warmup_steps": 40}}
    out["kd"] = {}
    return out


def method_recipe(target: Target, prompts: Path, minutes: float, changes: dict[str, Any]) -> Recipe:
    """A variant of the base recipe of scripts/bench_kd.py, on a budget of minutes."""
    base = base_settings(target, prompts, -1)
    base["method"] = changes.get("method", "kd")
    base["training"] |= {"max_minutes": minutes, "eval_steps": 100, "acceptance_steps": 300}
    sections = {name: value for name, value in changes.items() if name != "method"}
    return recipe_of(base, sections)


def table(report: dict[str, Any], runs: dict[str, RunFolder]) -> Table:
    """One row for each configuration: its kind, depth or tree, acceptance length and speedup with intervals."""
    out = Table("draft", "steps", "mode", "K", "tree", "tau", "[95%]", "speedup", "[95%]", "c", "v")
    for run in report["runs"]:
        if run["draft"] == "none":
            continue
        label = run["label"].rsplit(" k=", 1)[0]
        log = [row for row in read_log(runs[label].log) if "loss" in row] if label in runs else []
        spread = run["intervals"]
        out.add_row(
            label,
            str(log[-1]["step"]) if log else "",
            run["mode"],
            str(run["k"]),
            "" if run["tree"] is None else str(len(run["tree"].get("parents", []))),
            f"{run['mean_acceptance_length']:.3f}",
            "-".join(f"{value:.2f}" for value in spread["mean_acceptance_length"]),
            f"{run['speedup']:.2f}x",
            "-".join(f"{value:.2f}" for value in spread["speedup"]),
            f"{run['c']:.3f}",
            f"{run['v']:.2f}",
        )
    return out


def main(
    output: Annotated[Path, typer.Option(help="Folder of all runs and the report.")] = Path("checkpoints/methods"),
    minutes: Annotated[float, typer.Option(help="Minutes of training of each.")] = 9.0,
    only: Annotated[list[str] | None, typer.Option(help="Train these variants; may be given several times.")] = None,
    prompts: Annotated[int, typer.Option(help="Measured prompts.", min=2, max=PROMPTS["test"])] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 64,
    k: Annotated[str, typer.Option(help="Drafts a round.")] = "2,4",
    measure: Annotated[bool, typer.Option(help="Measure what is trained.")] = True,
) -> None:
    """Train the variants one after the other, then measure them together."""
    quiet_libraries()
    planned = variants()
    check_only(only, planned)
    target = demo_target()
    folder = (output / "prompts").absolute()
    if not all((folder / f"{split}.jsonl").exists() for split in SPLITS):
        write_prompts(folder, target.tokenizer, PROMPTS)
    first = RunFolder(output / "base")
    first.claim(method_recipe(target, folder, minutes, {}))
    with first.lock():
        prepared = prepare(method_recipe(target, folder, minutes, {}), first, target)
    for name in only if only is not None else planned:
        recipe = method_recipe(target, folder, minutes, planned[name])
        likewise = name.startswith("medusa-") and (output / "medusa" / "done.json").exists()
        base = RunFolder(output / "medusa") if likewise else first
        run_variant(name, recipe, base, output, target, same_features=likewise or recipe.method == "kd")
    runs = {name: RunFolder(output / name) for name in planned if (output / name / "done.json").exists()}
    if not measure or not runs:
        return
    recipe = method_recipe(target, folder, minutes, {})
    settings = settings_with(
        recipe.evaluation,
        k=[int(part) for part in k.split(",")],
        temperature=[0.0, 0.8],
        num_prompts=prompts,
        max_new_tokens=max_new_tokens,
        ngram=True,
    )
    rows = [row["input_ids"] for row in prepared.rows["train"]]
    seeds = {name: run for name, run in runs.items() if name == "medusa" or name.startswith("medusa-seed")}
    once = {name: run for name, run in runs.items() if name == "medusa" or name not in seeds}
    measure_all(once, target, settings, recipe, rows, output / "evaluation")
    if len(seeds) > 1:
        settings = settings_with(settings, k=[max(settings.k)], temperature=[0.0], ngram=False)
        measure_all(seeds, target, settings, recipe, rows, output / "evaluation-seeds")


def measure_all(runs: dict[str, RunFolder], target: Target, settings, recipe: Recipe, rows, folder: Path) -> None:
    """One report of these runs, and its table."""
    started = time.perf_counter()
    sources = {name: run.path for name, run in runs.items()}
    report = compare_drafts(sources, target, settings, recipe=recipe, training_rows=rows)
    _, html = write_report(report, folder)
    Console(width=160).print(table(report, runs))
    print(json.dumps({"prompts": report["prompts"], "minutes": round((time.perf_counter() - started) / 60, 1)}))
    print("report in", html)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
