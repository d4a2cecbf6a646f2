"""What minutes of training are worth: the demo's EAGLE-3 recipe for 20 and 60 minutes on Gemma 3 270M, then the clock.

    make bench-quality                     # or: python scripts/bench_quality.py --minutes 20,60 --output FOLDER

The target answers prompts from the standard library (more of them than in the demo), features are stored before the
clock starts, and each draft is trained for its minutes of wall-clock time, validation and measuring included. Then the
drafts and n-gram lookup, each at its best K, run on 64 test prompts from files held out whole, interleaved with plain
decoding prompt by prompt, greedy and sampled at T = 0.8 (bf16; float32 where the CPU emulates that). Each K is chosen
on the validation prompts, so that the choice does not flatter. Beside the speedups: acceptance lengths, costs, and the
share of repeated 8-grams, which flatters every draft and lookup most of all. 20 minutes are to give at least 2.0 times
plain decoding greedy and 1.3 sampled, 60 minutes 2.4 and 1.5; exits with 1 where they do not. In vLLM: drafttrain
evaluate FOLDER/20-minutes --engine vllm (at least 1.8). What is done is kept: run again to go on. About three and a
half hours on two CPU cores.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_kd import recipe_of, run_variant
from rich.console import Console
from rich.table import Table

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.chat_template import Chat
from drafttrain.data.files import write_json
from drafttrain.data.prepare import Prepared, prepare
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.demo import demo_dtype, demo_recipe, demo_target
from drafttrain.demo_prompts import write_prompts
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.run import load_prompts
from drafttrain.evaluate.runner import NGRAM, Candidate, Prompt, evaluate
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import Recipe, override_recipe
from drafttrain.target import Target

GOALS = {20.0: {"greedy": 2.0, "sampled": 1.3}, 60.0: {"greedy": 2.4, "sampled": 1.5}}
"""Times plain decoding, by minutes of training."""
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, draft_mode="probabilistic")}
CALIBRATION = 16


def run_name(minutes: float, name: str = "") -> str:
    """The folder and label of a run."""
    return f"{name}{minutes:g}-minutes"


def quality_recipe(target: Target, prompts: Path, minutes: float, answer: int, changes: list[str]) -> Recipe:
    """The demo's recipe on these prompts, with longer answers, for so many minutes; changes: dotted overrides."""
    base = demo_recipe(target, prompts, minutes).model_dump(mode="json")
    regenerate = base["data"]["regenerate"] | {"max_new_tokens": answer}
    return override_recipe(recipe_of(base, {"data": {"regenerate": regenerate}}), changes)


def prepare_once(target: Target, recipe: Recipe, output: Path, counts: Mapping[str, int]) -> tuple[Prepared, RunFolder]:
    """Prompts, answers and features in output/prompts and output/base, which all runs share."""
    folder = output / "prompts"
    if not all((folder / f"{split}.jsonl").exists() for split in counts):
        write_prompts(folder, target.tokenizer, counts)
    found = {split: len((folder / f"{split}.jsonl").read_text().splitlines()) for split in counts}
    if found != dict(counts):
        raise RunError(f"{folder} holds {found} prompts, {dict(counts)} are asked for. Mend: another --output.")
    base = RunFolder(output / "base")
    base.claim(recipe)
    with base.lock():
        return prepare(recipe, base, target), base


def candidates_of(runs: Mapping[str, RunFolder], target: Target, ks: Mapping[str, tuple[int, ...]]) -> list[Candidate]:
    """n-gram lookup and every trained draft, each at its K."""
    drafts = {name: load_draft(run.path, target) for name, run in runs.items()}
    out = [Candidate(NGRAM.label, NGRAM.kind, NGRAM.make, trained=False, ks=ks[NGRAM.label])]
    for name, draft in drafts.items():
        make = lambda draft=draft: draft.proposer(target)  # noqa: E731
        out.append(Candidate(name, draft.method, make, checkpoint=str(runs[name].path), ks=ks[name]))
    return out


def best_depths(report: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """{label without K: (the K of the highest speedup,)}."""
    best: dict[str, tuple[float, int]] = {}
    for run in report["runs"]:
        if run["draft"] != "none":
            label = run["label"].rsplit(" k=", 1)[0]
            best[label] = max(best.get(label, (0.0, 0)), (run["speedup"] or 0.0, run["k"]))
    return {label: (k,) for label, (_, k) in best.items()}


def measured(path: Path, asked: Mapping[str, Any], make) -> dict[str, Any]:
    """The report in a file; where it is missing, or of other settings, `make` makes it."""
    if path.exists():
        found = json.loads(path.read_text())
        if found["asked"] == asked:
            return found["report"]
    report = make()
    if report["interrupted"]:
        raise RunError(f"{path.stem} was interrupted. Mend: run the same command again; what is done is kept.")
    write_json(path, {"asked": asked, "report": report})
    return report


def measure(
    runs: Mapping[str, RunFolder],
    target: Target,
    calibration: list[Prompt],
    prompts: list[Prompt],
    ks: list[int],
    new: int,
    rows: list[list[int]],
    output: Path,
    prefix: str,
) -> dict[str, dict[str, Any]]:
    """{mode: report on the test prompts, each draft at the K that was fastest on the calibration prompts}."""
    reports = {}
    trained = {
        name: json.loads((run.draft / "drafttrain.json").read_text())["validation"] for name, run in runs.items()
    }
    common = {"runs": trained, "new": new, "threads": torch.get_num_threads(), "dtype": str(target.dtype)}
    for mode, sampling in SAMPLINGS.items():
        options = {"samplings": (sampling,), "max_new_tokens": new, "ngram": False}

        def calibrate(options=options) -> dict[str, Any]:
            every = dict.fromkeys((NGRAM.label, *runs), tuple(ks))
            candidates = candidates_of(runs, target, every)
            return evaluate(target, candidates, calibration, k=ks, certificate=False, name="validation", **options)

        asked = {**common, "ks": ks, "prompts": len(calibration)}
        found = measured(output / f"{prefix}calibration-{mode}.json", asked, calibrate)
        chosen = best_depths(found)

        def test(options=options, chosen=chosen) -> dict[str, Any]:
            candidates = candidates_of(runs, target, chosen)
            return evaluate(target, candidates, prompts, k=ks, training_rows=rows, name="test", **options)

        asked = {**common, "chosen": {label: list(k) for label, k in chosen.items()}, "prompts": len(prompts)}
        reports[mode] = measured(output / f"{prefix}test-{mode}.json", asked, test)
    return reports


def table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each draft and mode, plain decoding included."""
    out = Table("draft", "mode", "K", "tau", "[95%]", "speedup", "[95%]", "tokens/s (range)", "c", "v")
    for mode, report in reports.items():
        for run in report["runs"]:
            speed = run["tokens_per_second"]
            cells = ["plain", mode, "", "1.00", "", "1", ""]
            if run["draft"] != "none":
                tau, fast = (run["intervals"][name] for name in ("mean_acceptance_length", "speedup"))
                cells = [run["label"].rsplit(" k=", 1)[0], mode, str(run["k"])]
                cells += [f"{run['mean_acceptance_length']:.2f}", _bounds(tau), f"{run['speedup']:.2f}", _bounds(fast)]
            costs = ["" if run[name] is None else f"{run[name]:.3f}" for name in ("c", "v")]
            out.add_row(*cells, f"{speed['pooled']:.1f} ({speed['min']:.1f}-{speed['max']:.1f})", *costs)
    return out


def _bounds(interval: list[float]) -> str:
    return f"{interval[0]:.2f}-{interval[1]:.2f}"


def verdicts(
    reports: Mapping[str, Mapping[str, Any]], minutes: list[float], name: str = ""
) -> Iterator[tuple[bool, str]]:
    """(reached, words) for each run that has a goal, in each mode."""
    for mode, report in reports.items():
        speeds = {run["label"].rsplit(" k=", 1)[0]: run for run in report["runs"]}
        for one in minutes:
            if one in GOALS:
                run, goal = speeds[run_name(one, name)], GOALS[one][mode]
                words = (
                    f"{run['speedup']:.2f} times plain decoding {_bounds(run['intervals']['speedup'])}, goal {goal:g}"
                )
                possible = run["speedup"] <= run["mean_acceptance_length"]
                words += "" if possible else "; more than tau: something stopped plain decoding, measure again"
                yield possible and run["speedup"] >= goal, f"{one:g} minutes, {mode}, K = {run['k']}: {words}"


def minutes_of(text: str) -> list[float]:
    """Positive numbers with commas; RunError for anything else."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if min(found) <= 0:
        raise RunError(f"--minutes is {text!r}. Expected positive numbers with commas. Mend: --minutes 20,60")
    return found


def main(
    output: Annotated[Path, typer.Option(help="Folder of runs and reports.")] = Path("checkpoints/bench-quality"),
    minutes: Annotated[str, typer.Option(help="Minutes of training, a run for each.")] = "20,60",
    train_prompts: Annotated[int, typer.Option(help="Prompts that are answered for training.", min=8)] = 2048,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=8)] = 112,
    test_prompts: Annotated[int, typer.Option(help="Measured prompts.", min=2)] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 96,
    k: Annotated[str, typer.Option(help="K to choose from.")] = "2,3,4,5,6",
    name: Annotated[str, typer.Option(help="Put before the runs' names, to keep those of other --set apart.")] = "",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override of the recipe: training.loss=jsd.")
    ] = None,
) -> None:
    """Prepare, train, measure; a table, the repetition, and a line for each goal."""
    quiet_libraries()
    wanted, ks = minutes_of(minutes), [int(part) for part in k.split(",")]
    target, output = demo_target(demo_dtype()), output.absolute()
    counts = {"train": train_prompts, "validation": 24, "test": test_prompts}
    overrides = list(changes or [])
    recipes = {m: quality_recipe(target, output / "prompts", m, answer_tokens, overrides) for m in wanted}
    shared = [change for change in overrides if change.startswith(("data.", "features."))]
    first = quality_recipe(target, output / "prompts", 1.0, answer_tokens, shared)
    started = time.perf_counter()
    prepared, base = prepare_once(target, first, output, counts)
    say = lambda line: console.print(line, highlight=False, soft_wrap=True)  # noqa: E731
    console = Console(width=150)
    say(f"data: ready in {(time.perf_counter() - started) / 60:.1f} minutes (those of an earlier call not counted)")
    for one, recipe in recipes.items():
        run_variant(run_name(one, name), recipe, base, output, target)
    runs = {run_name(one, name): RunFolder(output / run_name(one, name)) for one in wanted}
    held = load_prompts(first.data.validation, target, Chat.of(first), CALIBRATION, 0)
    prompts = load_prompts(first.data.test, target, Chat.of(first), test_prompts, 0)
    rows = [row["input_ids"] for row in prepared.rows["train"]]
    reports = measure(runs, target, held, prompts, ks, max_new_tokens, rows, output, name)
    console.print(table(reports))
    for mode, report in reports.items():
        facts = report["prompts"]
        shares = f"{facts['repeated_8gram_share']:.1%} of the plain text repeats an earlier 8-gram of its own"
        say(f"{mode}: {facts['count']} prompts; {shares}; overlap with the training data {facts['train_overlap']}")
    reached = []
    for passed, words in verdicts(reports, wanted, name):
        reached.append(passed)
        say(f"{'PASS' if passed else 'FAIL'} {words}")
    if not all(reached):
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
