"""kill -9 at random moments of a run, over and over: it must resume, leave nothing corrupt, and end bit-identical.

    python scripts/check_kills.py --rounds 60                     # kills; a few minutes on two CPU cores
    python scripts/check_kills.py --method medusa --seed 1
    python scripts/check_kills.py --at features,saving,draft      # these three moments instead of random ones

A tiny target answers prompts, its states are stored, a draft is trained on them in fp32 on one thread. A life is a
fresh folder: killed one to four times, then left to finish, and compared with a run that nobody killed: every
safetensors file of the prepared data, of the draft and of the last checkpoint, the optimizer's state, the log but for
its times, and the names of all files. Every other kill waits for files of a random kind to be under way. Stops at the
first fault, with 1; the folder is kept then.
"""

import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.cli import run_command, run_training
from drafttrain.errors import UserError
from drafttrain.training import run as training_run
from drafttrain.training.callbacks import read_log
from drafttrain.training.checkpoints import LISTING, fault

WORDS = 90
MOMENTS = {
    "answers": ("prepared", "regenerated-*.jsonl"),
    "rows": ("prepared", ".*.new"),
    "features": ("prepared/features", "*/.*.tmp"),
    "saving": (".", ".saving"),
    "draft": (".", ".draft.new"),
}
"""Files that are written at a moment: a new one of these is waited for."""
STAGES = (
    ("saving a checkpoint", ("_save_checkpoint",)),
    ("writing the best draft", ("save_draft",)),
    ("evaluating", ("validate", "measure", "evaluate", "_calibrate_tree")),
    ("training", ("_inner_training_loop", "fit")),
    ("writing features", ("write_store", "write_features")),
    ("writing answers", ("regenerate",)),
    ("preparing", ("prepare",)),
    ("resuming", ("settle", "cut_log")),
)
"""Functions on the stack of a process when it is killed, innermost stage first; none of them: starting or ending."""
TIMED = ("minutes", "_per_second", "seconds", "runtime", "data_wait", "memory")
LONGEST = 300.0
"""Seconds: a run that takes longer hangs."""


class KillError(UserError):
    """What a killed run left is not as it should be."""


def write_inputs(folder: Path, method: str) -> Path:
    """A tiny random target, prompts, and a recipe; returns the recipe's path."""
    torch.manual_seed(0)
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": len(vocabulary), "num_hidden_layers": 8, "max_position_embeddings": 128}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(folder / "target")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **specials).save_pretrained(folder / "target")
    rng = random.Random(0)
    for split, count in (("train", 40), ("validation", 8)):
        rows = [
            {"prompt": " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randrange(3, 12)))} for _ in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {
        "bf16": False,
        "max_tokens_per_batch": 128,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 2,
        "acceptance_prompts": 3,
        "acceptance_new_tokens": 8,
        **({"ttt_steps": 3} if method == "eagle3" else {}),
    }
    recipe = {
        "method": method,
        "target": {"name_or_path": str(folder / "target"), "dtype": "float32"},
        "data": {
            **{split: [{"path": str(folder / f"{split}.jsonl")}] for split in ("train", "validation")},
            "regenerate": {"max_new_tokens": 16},
            **({} if method == "kd" else {"draft_vocab": 60}),
        },
        "features": {"source": "online" if method == "kd" else "store", "dtype": "float32"},
        "training": training,
        "export": {"dtype": "float32"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class Life:
    """A training process of a run folder: a fork of this one, which has imported everything."""

    def __init__(self, recipe: Path, folder: Path, logs: Path):
        self.folder, self.stack, self.output = folder, logs / "stack", logs / "output"
        self.stack.write_text("")
        self.started, self.born = time.monotonic(), time.time()
        self.pid = os.fork()
        if not self.pid:
            self._train(recipe)

    def _train(self, recipe: Path) -> None:
        status = 1
        try:
            with open(self.output, "w") as output, open(self.stack, "w") as stack:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
                torch.set_num_threads(1)
                run_training(recipe, None, self.folder, False, False)
                status = 0
        finally:  # Whatever came, the fork must not go on as the script.
            if status:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)

    def over(self) -> bool:
        """Whether it has ended by itself. KillError where it failed, or hangs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() - self.started > LONGEST:
            self.kill()
            raise KillError(f"{self.folder}: no end after {LONGEST:.0f} s")
        if done and status:
            raise KillError(f"{self.folder}: the run failed\n{self.output.read_text()[-3000:]}")
        return bool(done)

    def kill(self) -> str:
        """kill -9; returns the stage that it was in: its stack is taken a moment before."""
        os.kill(self.pid, signal.SIGUSR2)
        waited = time.monotonic()
        while not self.stack.stat().st_size and time.monotonic() - waited < 0.2:
            time.sleep(0.0005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        functions = {line.split()[-1] for line in self.stack.read_text().splitlines() if " in " in line}
        return next((stage for stage, names in STAGES if functions & set(names)), "starting or ending")

    def wait(self) -> float:
        """Let it finish; seconds since its start."""
        while not self.over():
            time.sleep(0.005)
        return time.monotonic() - self.started

    def writes(self, moment: str) -> bool:
        """Whether it has begun to write files of a kind; those of a life before do not count."""
        place, pattern = MOMENTS[moment]
        try:
            return any(path.stat().st_mtime > self.born for path in (self.folder / place).glob(pattern))
        except FileNotFoundError:  # Renamed between the two looks.
            return True


def kill_once(life: Life, rng: random.Random, whole: float, moment: str | None) -> str | None:
    """Kill at a moment, or at a random time; the stage, or None where it ended before."""
    at = life.started + rng.uniform(0, whole)
    while not (life.writes(moment) if moment else time.monotonic() >= at):
        if life.over():
            return None
        time.sleep(0.0003)
    if moment:
        time.sleep(rng.uniform(0, 0.01))
    return None if life.over() else life.kill()


def check_left(folder: Path) -> None:
    """What a killed process may leave: whole checkpoints, whole weights under their final names."""
    for checkpoint in folder.glob("checkpoint-*"):
        found = "it has no listing" if not (checkpoint / LISTING).exists() else fault(checkpoint)
        if found:
            raise KillError(f"{checkpoint}: {found}")
    for file in folder.rglob("*.safetensors"):
        if not any(part.startswith(".") for part in file.relative_to(folder).parts):
            load_file(file)
    for file in (*folder.glob("*/*.json"), *folder.glob("prepared/features/*/*.json")):
        json.loads(file.read_text())


def compare(folder: Path, reference: Path) -> None:
    """KillError unless a run ended as the uninterrupted one did."""
    names = [{str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (folder, reference)]
    if names[0] != names[1]:
        raise KillError(f"{folder}: other files than {reference}: {sorted(names[0] ^ names[1])[:8]}")
    for name in sorted(names[0]):
        mine, its = folder / name, reference / name
        if name.endswith(".safetensors") and mine.read_bytes() != its.read_bytes():
            raise KillError(f"{mine}: other bytes than {its}")
        if name.endswith("optimizer.pt"):
            states = [torch.load(path)["state"] for path in (mine, its)]
            same = all(torch.equal(states[0][i][n], value) for i in states[1] for n, value in states[1][i].items())
            if states[0].keys() != states[1].keys() or not same:
                raise KillError(f"{mine}: another state than in {its}")
    # The line with train_loss is of one session, not of the run.
    logs = [[untimed(r) for r in read_log(f / "log.jsonl") if "train_loss" not in r] for f in (folder, reference)]
    if logs[0] != logs[1]:
        differ = next((pair for pair in zip(*logs, strict=False) if pair[0] != pair[1]), [len(log) for log in logs])
        raise KillError(f"{folder}/log.jsonl: other rows than {reference}: {differ}")


def untimed(row: dict) -> dict:
    """A row of the log without what the clock says."""
    return {name: value for name, value in row.items() if not any(word in name for word in TIMED)}


def check(folder: Path, method: str, kills: int, seed: int, moments: list[str] | None = None) -> Counter:
    """Kill so many times, at `moments` or at random; how often in which stage. KillError at the first fault."""
    recipe, rng, tally = write_inputs(folder, method), random.Random(seed), Counter()
    logs = folder / "logs"
    logs.mkdir()
    whole = Life(recipe, folder / "reference", logs).wait()
    print(f"a whole run takes {whole:.1f} s", flush=True)
    planned, number = list(moments or ()), 0
    while sum(tally.values()) < kills:
        number += 1
        run, left = folder / f"run-{number}", len(planned) or rng.randint(1, 4)
        landed: list[str] = []
        while len(landed) < left and sum(tally.values()) < kills:
            drawn = rng.choice([None] * len(MOMENTS) + list(MOMENTS))
            moment = planned[sum(tally.values())] if planned else drawn
            stage = kill_once(Life(recipe, run, logs), rng, whole, moment)
            if stage is None:
                break
            landed.append(stage)
            tally[stage] += 1
            check_left(run)
        Life(recipe, run, logs).wait()
        compare(run, folder / "reference")
        print(f"{sum(tally.values()):3d} kills  {run.name}: {', '.join(landed) or 'none'}; the same", flush=True)
        shutil.rmtree(run)
    return tally


def main(
    rounds: Annotated[int, typer.Option(help="How many kills.", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    method: Annotated[str, typer.Option(help="eagle3, medusa or kd.")] = "eagle3",
    at: Annotated[str | None, typer.Option(help=f"Moments instead of random ones: {', '.join(MOMENTS)}.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to work in. Default: a temporary one.")] = None,
) -> None:
    """Kill a training run again and again, and see that it always ends as if nothing had been."""
    assert training_run.train, "imported before the forks"
    moments = at.split(",") if at else None
    if unknown := sorted(set(moments or ()) - MOMENTS.keys()):
        raise KillError(f"--at names {', '.join(unknown)}; expected {', '.join(MOMENTS)}")
    folder = output or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    tally = check(folder, method, len(moments) if moments else rounds, seed, moments)
    for stage, count in tally.most_common():
        print(f"{count:4d}  {stage}")
    print(f"{sum(tally.values())} kills of {method}, seed {seed}: every run resumed and ended bit-identical")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
