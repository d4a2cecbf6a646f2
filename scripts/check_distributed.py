"""Does training under each accelerate configuration give the trajectory of one process? Run it on the machine and with
the recipe that are to be trusted:

    python scripts/check_distributed.py RECIPE --engines ddp fsdp2 zero1 zero2 zero3 --processes 2 --launches 5

Every engine (a file in recipes/accelerate/) trains a few steps of the recipe in fp32, `--launches` times; one process
with as much more accumulation is what losses, gradient norms, measured acceptance and last weights are compared with.
Of the last launch half is thrown away, and one process goes on from its checkpoint. Exit status 1 on a fault.

Without GPUs the processes are CPUs that talk through gloo. accelerate offers FSDP and DeepSpeed on devices only, so the
worker tells it that the CPUs are its devices; nothing else differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
FIGURES, WEIGHTS = 1e-5, 1e-3
"""Tolerances: of losses and gradient norms against the largest of the run; of weights against the largest change in
their tensor. The same numbers are summed in another order, in fp32, and where a gradient is near zero Adam makes a step
of its rounding.
"""


class Fault(Exception):
    """A launch that failed, or a trajectory that is another."""


Runs = Sequence[tuple[Path, Path]]


def launch(engine: str | None, processes: int, runs: Runs, overrides: Sequence[str] = ()) -> None:
    """Train each (recipe, run folder) in turn, in one `accelerate launch` of that engine; None: one process without.

    Fault with the end of its output where that fails.
    """
    places = [str(path.resolve()) for run in runs for path in run]
    command = [sys.executable]
    if engine is not None:
        config = ROOT / "recipes" / "accelerate" / f"{engine}.yaml"
        options = ("--config_file", config, "--num_processes", processes, "--main_process_port", 0)
        command += ["-m", "accelerate.commands.launch", *map(str, options)]
    command += [__file__, "--worker", *places, "::", *overrides]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise Fault(f"{engine or 'one process'} failed:\n{done.stdout[-1000:]}\n{done.stderr[-20_000:]}")


def work(arguments: Sequence[str]) -> None:
    """What each process of a launch does: `drafttrain train`, on one recipe after the other."""
    import torch

    if not torch.accelerator.is_available():
        take_cpus_for_devices()
    from drafttrain.cli import end_training, run_training

    end = arguments.index("::")
    for recipe, folder in zip(arguments[0:end:2], arguments[1:end:2], strict=True):
        run_training(Path(recipe), list(arguments[end + 1 :]), Path(folder), False, False)
    end_training()


def take_cpus_for_devices() -> None:
    """Let accelerate take the CPUs of a launch with FSDP or DeepSpeed for its devices; with DDP it knows CPUs."""
    import torch
    from accelerate import DistributedType, PartialState

    if {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys():
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
        torch.distributed.init_process_group("gloo")
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        shrink_deepspeed()


def shrink_deepspeed() -> None:
    """gloo instead of DeepSpeed's own communication on CPUs, which would be compiled first; and ZeRO-3 shards every
    tensor: it keeps small ones whole, and a tiny model has no others.
    """
    import deepspeed
    from accelerate import DeepSpeedPlugin

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    made = DeepSpeedPlugin.__post_init__

    def make(plugin: DeepSpeedPlugin) -> None:
        made(plugin)
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    DeepSpeedPlugin.__post_init__ = make


def read(folder: Path, key: str) -> list[float]:
    """All values of a key in a run's log, in the order of the steps."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def weights(folder: Path) -> dict:
    """Name -> tensor of a folder's model.safetensors."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def compare(found: Path, expected: Path, step: int, start: dict) -> dict[str, float]:
    """The largest residuals of a run against another at a step, relative as `FIGURES` has it; start: weights before the
    training. Fault where one is above the tolerance, or the measured acceptance is another.
    """
    residuals = {}
    for key in ("loss", "grad_norm", "eval_loss"):
        a, b = read(found, key), read(expected, key)
        if len(a) != len(b):
            raise Fault(f"{found.name}: {len(a)} values of {key}, expected {len(b)}")
        residuals[key] = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, b))
    if read(found, "eval_acceptance_length") != read(expected, "eval_acceptance_length"):
        raise Fault(f"{found.name}: another measured acceptance length")
    a, b = (weights(run / f"checkpoint-{step}") for run in (found, expected))
    if a.keys() != b.keys():
        raise Fault(f"{found.name}: checkpoint-{step} holds other tensors")
    moved = {name: float((b[name] - start[name]).abs().max()) for name in b if b[name].is_floating_point()}
    residuals["weights"] = max(float((a[n] - b[n]).abs().max()) / m for n, m in moved.items() if m)
    if max(residuals[key] for key in ("loss", "grad_norm", "eval_loss")) > FIGURES or residuals["weights"] > WEIGHTS:
        raise Fault(f"{found.name}: residuals {residuals} above {FIGURES} (weights: {WEIGHTS})")
    return residuals


def goes_on(run: Path, half: int, folder: Path) -> Path:
    """A copy of a run as it was after its checkpoint of half the steps."""
    shutil.copytree(run, folder)
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name != f"checkpoint-{half}":
            shutil.rmtree(checkpoint)
    return folder


def start_of(folder: Path) -> dict:
    """The weights that a run started from, by the names of its checkpoints."""
    return weights(folder / "untrained" / "master")


def check(recipe: Path, engines: Sequence[str], processes: int, launches: int, steps: int, folder: Path) -> int:
    """Print a line for each launch and resume; how many were faults."""
    from drafttrain.recipe import load_recipe

    half = steps // 2
    fixed = ("bf16=false", "max_minutes=null", "logging_steps=1", f"max_steps={steps}")
    overrides = [f"training.{setting}" for setting in fixed]
    overrides += [f"training.{name}={half}" for name in ("eval_steps", "save_steps", "acceptance_steps")]
    accumulation = processes * load_recipe(recipe).training.gradient_accumulation_steps
    alone = [*overrides, f"training.gradient_accumulation_steps={accumulation}"]
    launch(None, 1, [(recipe, folder / "alone")], alone)
    start, faults = start_of(folder / "alone"), 0
    for engine in engines:
        for number in range(1, launches + 1):
            name = f"{engine}-{number}"
            shutil.copytree(folder / "alone" / "prepared", folder / name / "prepared")
            shutil.copy(folder / "alone" / "recipe.yaml", folder / name)
            jobs = [(name, engine, processes, overrides)]
            if number == launches:
                jobs.append((f"{engine}-resumed", None, 1, alone))
            for job, by, count, options in jobs:
                try:
                    run = goes_on(folder / name, half, folder / job) if by is None else folder / job
                    launch(by, count, [(recipe, run)], options)
                    residuals = compare(run, folder / "alone", steps, start)
                    print(f"{job}: {', '.join(f'{key} {value:.1e}' for key, value in residuals.items())}", flush=True)
                except Fault as fault:
                    faults += 1
                    print(f"{job}: FAULT {fault}", flush=True)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="an even number; half of it before the resume")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = (arguments.engines, arguments.processes, arguments.launches, arguments.steps)
        faults = check(arguments.recipe, *settings, Path(folder))
    print(f"{faults} faults" if faults else "every trajectory is that of one process")
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        sys.exit(main())
