"""How well `tune` predicts: c, v and acceptance from a calibration pass on other prompts against the measured speedup.

    python scripts/bench_tune.py --draft checkpoints/demo

Three drafts of different kinds on Gemma 3 270M at K = 1..5, greedy: n-gram lookup, the given EAGLE-3 draft, and a small
causal language model (default: some of the target's own layers) whose head has the EAGLE-3 draft's rows. Prints a row
for each configuration, then the median error and its spread. Half an hour on two CPU cores with nothing else running;
--output FOLDER keeps the report.
"""

import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from drafttrain.cli import run_command
from drafttrain.data.progress import progress_bar
from drafttrain.demo import PROMPTS, demo_target, prompt_folder
from drafttrain.drafts.loading import load_draft
from drafttrain.drafts.small_model import SmallModelProposer, prune_layers
from drafttrain.evaluate.report import write_report
from drafttrain.evaluate.run import load_prompts
from drafttrain.evaluate.runner import NGRAM, Candidate
from drafttrain.evaluate.tune import print_tune, tune
from drafttrain.recipe import DataEntry
from drafttrain.target import load_target


def main(
    draft: Annotated[str, typer.Option(help="EAGLE-3 draft: run folder, draft folder or hub id.")],
    small: Annotated[str | None, typer.Option(help="Small model, folder or hub id. Default: a pruned target.")] = None,
    layers: Annotated[str, typer.Option(help="Target layers, from 0, that make the small draft.")] = "0,1,3,5,10,11",
    prompts: Annotated[int, typer.Option(help="Measured prompts.", min=1, max=PROMPTS["test"])] = 12,
    calibration: Annotated[int, typer.Option(help="Calibration prompts.", min=1, max=PROMPTS["validation"])] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)] = 80,
    k: Annotated[list[int] | None, typer.Option(help="K; may be given several times. Default: 1 to 5.")] = None,
    output: Annotated[Path | None, typer.Option(help="A folder for report.json and report.html.")] = None,
) -> None:
    """Predict and measure, interleaved."""
    target = demo_target()
    folder = prompt_folder(target)
    test, other = (
        load_prompts([DataEntry(path=str(folder / f"{split}.jsonl"))], target, "auto", count, 0)
        for split, count in (("test", prompts), ("validation", calibration))
    )
    loaded = load_draft(draft, target)
    model = load_target(small) if small else prune_layers(target, [int(layer) for layer in layers.split(",")])
    candidates = [
        NGRAM,
        Candidate("eagle3", "eagle3", lambda: loaded.proposer(target), True, draft),
        Candidate("small model", "kd", lambda: SmallModelProposer(model, loaded.draft_ids), True, small),
    ]
    report = tune(
        target, candidates, other, test, ks=k or [1, 2, 3, 4, 5], max_new_tokens=max_new_tokens, bar=progress_bar
    )
    print_tune(report, Console())
    errors = sorted(abs(run["predicted"]["error"]) for run in report["runs"] if "predicted" in run)
    signed = statistics.mean(run["predicted"]["error"] for run in report["runs"] if "predicted" in run)
    print(
        f"{len(errors)} configurations on {len(test)} prompts x {max_new_tokens} tokens, calibrated on {len(other)} "
        f"others: median error {statistics.median(errors):.1%}, range {errors[0]:.1%} to {errors[-1]:.1%}, mean "
        f"{signed:+.1%}"
    )
    if output:
        print("report in", write_report(report, output)[1])


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
