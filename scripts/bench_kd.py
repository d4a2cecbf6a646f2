"""What distillation is worth on Gemma 3 270M: one student, one set of answers, one budget, and many objectives.

    python scripts/bench_kd.py --output checkpoints/bench-kd

The student keeps six of the target's 18 layers. Every variant sees the same answers of the target (512 prompts from the
standard library, half greedy, half at T = 0.8) in the same order for the same number of steps, seed 0: plain language
modelling on them, forward and reverse KL, JSD, TV, the two acceptance losses, a cached top-64 teacher, and a fresh
narrow student. On- and off-policy are given the same minutes instead of the same steps. Then all of them, the untrained
student among them, draft for the same held-out prompts at K = 4, T = 0 and 1: acceptance length with intervals, and
paired differences. What distillation adds to plain language modelling is measured again, greedy, on more prompts: the
beginnings of functions of the installed transformers, which no student has seen. What is done is kept: run again to go
on; --only NAME trains some. About two hours on two CPU cores.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.table import Table

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.files import write_json
from drafttrain.data.prepare import prepare
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.demo import demo_target
from drafttrain.demo_prompts import write_prompts
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.run import compare_drafts, settings_with
from drafttrain.recipe import Recipe, parse_recipe
from drafttrain.target import Target
from drafttrain.training.callbacks import read_log
from drafttrain.training.run import train

PROMPTS = {"train": 512, "validation": 24, "test": 48}
SPLITS = ("train", "validation", "test")
LOSSES = ("next_token", "forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")
FRESH = {"student": "fresh", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
K = 4


def variants(minutes: float) -> dict[str, dict[str, Any]]:
    """{name: {section: changed settings}}."""
    online = {"features": {"source": "online"}, "training": {"max_minutes": minutes, "max_steps": -1}}
    own = {"on_policy": {"share": 0.5, "max_new_tokens": 48, "temperature": 1.0}}
    return {
        **{loss: {"training": {"loss": loss}} for loss in LOSSES},
        "topk_64": {"features": {"source": "topk", "top_k": 64}},
        "fresh": {"draft": {**FRESH, "num_key_value_heads": 2}, "training": {"learning_rate": 2e-3}},
        "off_policy": online,
        "on_policy": {**online, "training": {**online["training"], **own}},
    }


def base_settings(target: Target, prompts: Path, steps: int) -> dict[str, Any]:
    """The recipe that all variants change."""
    return {
        "method": "kd",
        "target": {"name_or_path": target.name},
        "data": {
            **{split: [{"path": str(prompts / f"{split}.jsonl")}] for split in SPLITS},
            "max_length": 256,
            "regenerate": {"max_new_tokens": 96, "temperature": [0.0, 0.8], "top_k": 50, "batch_size": 64},
        },
        "draft": {"student": "pruned", "num_hidden_layers": 6},
        "features": {"source": "store"},
        "training": {
            "num_train_epochs": 1000,
            "max_steps": steps,
            "max_tokens_per_batch": 1024,
            "learning_rate": 3e-4,
            "warmup_steps": 10,
            "eval_steps": 1000,
            "save_steps": 1000,
            "save_total_limit": 1,
            "logging_steps": 5,
        },
        "evaluation": {"k": [K], "temperature": [0.0, 1.0], "draft_mode": "probabilistic", "ngram": False},
    }


def recipe_of(base: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """The base with a variant's sections merged in; a fresh student's shape replaces the pruned one's."""
    merged = dict(base)
    for section, values in changes.items():
        merged[section] = values if section == "draft" else {**base.get(section, {}), **values}
    return parse_recipe(merged)


def share_answers(base: RunFolder, run: RunFolder, source: str) -> None:
    """Give a variant a copy of the base run's answers, and hard links to its features where it reads the same."""
    run.prepared.mkdir(parents=True, exist_ok=True)
    for path in base.prepared.glob("regenerated-*.jsonl"):
        if not (run.prepared / path.name).exists():
            shutil.copyfile(path, run.prepared / path.name)
    if source == "store" and (base.prepared / "features").exists() and not (run.prepared / "features").exists():
        shutil.copytree(base.prepared / "features", run.prepared / "features", copy_function=os.link)


def budget_of(recipe: Recipe) -> dict[str, Any]:
    """What all variants must have alike to be compared."""
    return {"max_steps": recipe.training.max_steps, "max_minutes": recipe.training.max_minutes}


def run_variant(
    name: str, recipe: Recipe, base: RunFolder, output: Path, target: Target, same_features: bool = True
) -> None:
    """Train one variant, unless that is done; a run that was cut off goes on. RunError for one of another budget.

    same_features: it reads what the base run has stored.
    """
    run, done = RunFolder(output / name), output / name / "done.json"
    if done.exists():
        found = json.loads(done.read_text())
        if found != budget_of(recipe):
            raise RunError(
                f"{run.path} was trained with {found}, {budget_of(recipe)} is asked for. Expected one budget for all. "
                "Mend: another --output, or remove that folder."
            )
        return
    run.claim(recipe)
    with run.lock():
        share_answers(base, run, recipe.features.source if same_features else "online")
        train(recipe, run, target, say=lambda line: print(f"{name}: {line}", flush=True))
        write_json(done, budget_of(recipe))


def check_only(only: list[str] | None, planned: Iterable[str]) -> None:
    """RunError for names that are no variants."""
    unknown = sorted(set(only or []) - set(planned))
    if unknown:
        raise RunError(f"--only is {', '.join(unknown)}. Expected some of {', '.join(planned)}.")


def table(report: dict[str, Any], runs: dict[str, RunFolder]) -> Table:
    """One row for each draft: tau at T = 0 and 1, and the paired difference from forward KL."""
    out = Table("draft", "steps", "minutes", "tau T=0", "[95%]", "less FKL", "tau T=1", "[95%]", "less FKL")
    labels = [run["label"].rsplit(" k=", 1)[0] for run in report["runs"] if run["draft"] == "kd"]
    for label in dict.fromkeys(labels):
        log = [row for row in read_log(runs[label].log) if "loss" in row] if label in runs else []
        cells = [label, str(log[-1]["step"]) if log else "0", f"{log[-1]['minutes']:.1f}" if log else "0"]
        for mode in ("greedy", "probabilistic"):
            (found,) = (
                run for run in report["runs"] if run["label"].rsplit(" k=", 1)[0] == label and run["mode"] == mode
            )
            low, high = found["intervals"]["mean_acceptance_length"]
            cells += [f"{found['mean_acceptance_length']:.3f}", f"{low:.2f}-{high:.2f}", _difference(report, found)]
        out.add_row(*cells)
    return out


def _difference(report: dict[str, Any], run: dict[str, Any]) -> str:
    for pair in report["comparisons"]:
        if run["id"] in (pair["a"], pair["b"]):
            other = next(r for r in report["runs"] if r["id"] == (pair["b"] if pair["a"] == run["id"] else pair["a"]))
            if other["label"].startswith("forward_kl"):
                sign = 1 if pair["a"] == run["id"] else -1
                low, high = sorted(sign * bound for bound in pair["tau_difference"]["interval"])
                return f"{sign * pair['tau_difference']['value']:+.3f} [{low:+.2f}, {high:+.2f}]"
    return ""


def compare_on_more(
    pair: dict[str, Path], target: Target, recipe: Recipe, count: int, concurrency: int, output: Path, rows
) -> str:
    """The paired difference of two students at T = 0 on the beginnings of transformers' functions, in one line."""
    folder = output / "more-prompts"
    write_prompts(folder, target.tokenizer, {"test": count}, source=Path(transformers.__file__).parent)
    settings = settings_with(
        recipe.evaluation,
        prompts=str(folder / "test.jsonl"),
        num_prompts=count,
        max_new_tokens=48,
        temperature=[0.0],
        concurrency=[concurrency],
    )
    report = compare_drafts(pair, target, settings, recipe=recipe, training_rows=rows)
    write_report(report, output / "evaluation-more")
    labels = {run["id"]: run["label"] for run in report["runs"]}
    (found,) = report["comparisons"]
    value, (low, high) = found["tau_difference"]["value"], found["tau_difference"]["interval"]
    a, b = labels[found["a"]], labels[found["b"]]
    return f"{count} prompts of transformers, T = 0: {a} less {b}: {value:+.3f} [{low:+.3f}, {high:+.3f}]"


def main(
    output: Annotated[Path, typer.Option(help="Folder of all runs and of the report.")] = Path("checkpoints/bench-kd"),
    steps: Annotated[int, typer.Option(help="Steps of about 1,000 tokens each.", min=1)] = 90,
    minutes: Annotated[float, typer.Option(help="Minutes of the on- and off-policy runs.")] = 6.0,
    only: Annotated[list[str] | None, typer.Option(help="Train these variants; may be given several times.")] = None,
    prompts: Annotated[int, typer.Option(help="Measured prompts.", min=2, max=PROMPTS["test"])] = 48,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 64,
    concurrency: Annotated[int, typer.Option(help="Prompts at a time; acceptance does not depend on it.")] = 8,
    more: Annotated[int, typer.Option(help="Further prompts for forward_kl and next_token; 0: none.")] = 160,
    measure: Annotated[bool, typer.Option(help="Measure what is trained.")] = True,
) -> None:
    """Train the variants one after the other, then measure them together."""
    quiet_libraries()
    planned = variants(minutes)
    check_only(only, planned)
    target = demo_target()
    folder = output / "prompts"
    if not all((folder / f"{split}.jsonl").exists() for split in SPLITS):
        write_prompts(folder, target.tokenizer, PROMPTS)
    base = base_settings(target, folder.absolute(), steps)
    first = RunFolder(output / "base")
    first.claim(recipe_of(base, {}))
    with first.lock():
        prepared = prepare(recipe_of(base, {}), first, target)
    for name in only if only is not None else planned:
        run_variant(name, recipe_of(base, planned[name]), first, output, target)
    if not measure:
        return
    runs = {name: RunFolder(output / name) for name in planned if (output / name / "done.json").exists()}
    sources = {name: run.path for name, run in runs.items()}
    pruned = [run for name, run in runs.items() if name != "fresh"]
    if not pruned:
        raise RunError(f"{output} holds no finished variant with the pruned student. Mend: train one first.")
    sources["untrained"] = pruned[0].untrained
    settings = settings_with(
        recipe_of(base, {}).evaluation,
        num_prompts=prompts,
        max_new_tokens=max_new_tokens,
        concurrency=[concurrency],
    )
    rows = [row["input_ids"] for row in prepared.rows["train"]]
    report = compare_drafts(sources, target, settings, recipe=recipe_of(base, {}), training_rows=rows)
    _, html = write_report(report, output / "evaluation")
    Console(width=160).print(table(report, runs))
    print(json.dumps({"prompts": report["prompts"], "device": report["device"]}))
    print("report in", html)
    pair = {name: sources[name] for name in ("forward_kl", "next_token") if name in sources}
    if more and len(pair) == 2:
        print(compare_on_more(pair, target, recipe_of(base, {}), more, concurrency, output, rows))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
