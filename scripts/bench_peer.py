"""What our EAGLE-3 and that of speculators 0.9.0 learn from the same tokens: Gemma 3 270M, three seeds, one evaluator.

    make peer                                                   # once: the other side's environment
    python scripts/bench_peer.py                                # --data checkpoints/bench-quality shares its answers

Both read the same stored features of the target's own answers, the same rows in the same batches, once through, for
--tokens tokens; both draft over the same 8,192 words. Ours is trained with the demo's settings, the peer's module by
its own code with its own defaults, on targets put right (scripts/peer_train.py). What the peer saves is checked by
`drafttrain check`, converted and loaded here like any draft from elsewhere. Then all of them draft for the same test
prompts at K = 4, greedy and sampled at T = 0.8: acceptance lengths, and the difference over all seeds with its 95%
interval, prompts resampled in pairs. Exits with 1 where the interval lies below zero. Speed is not compared here
(scripts/bench_train.py does that). Both run in bf16, on a CPU that emulates it in float32. What is done is kept: run
again to go on. Half an hour to an hour on two CPU cores.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_kd import run_variant
from bench_quality import prepare_once, quality_recipe
from bench_train import PEER_PYTHON
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from drafttrain.cli import quiet_libraries, run_command
from drafttrain.data.batching import TokenBudgetSampler, collate
from drafttrain.data.chat_template import Chat
from drafttrain.data.files import write_json
from drafttrain.data.prepare import Prepared
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.demo import demo_dtype, demo_target
from drafttrain.drafts.base import Batch
from drafttrain.drafts.loading import load_draft
from drafttrain.evaluate.run import load_prompts
from drafttrain.evaluate.statistics import bootstrap_difference, bootstrap_ratio
from drafttrain.export.check import check_draft
from drafttrain.export.convert import convert_draft
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import Recipe, override_recipe
from drafttrain.specdec.decode import generate
from drafttrain.target import Target

SCRIPT = Path(__file__).with_name("peer_train.py")
K, GROUP = 4, 8
SAMPLINGS = {"greedy": Sampling(), "T = 0.8": Sampling(0.8, draft_mode="probabilistic")}
SIDES = ("ours", "peer")


Data = Annotated[Path | None, typer.Option(help="Folder of prompts, answers and features. Default: --output's own.")]
Tokens = Annotated[int, typer.Option(help="Tokens of a run.", min=1000)]
TrainPrompts = Annotated[int, typer.Option(help="Prompts that are answered for training.", min=8)]
AnswerTokens = Annotated[int, typer.Option(help="Tokens of an answer.", min=8)]
TestPrompts = Annotated[int, typer.Option(help="Measured prompts.", min=2)]
NewTokens = Annotated[int, typer.Option(help="New tokens for each prompt.", min=2)]


@dataclass(frozen=True)
class Ready:
    """What all runs share. recipe: the demo's, of the folder `home`; prompts: the measured ones, as ids."""

    target: Target
    home: Path
    recipe: Recipe
    prepared: Prepared
    base: RunFolder
    prompts: list[list[int]]

    @classmethod
    def make(cls, home: Path, train_prompts: int, answer_tokens: int, test_prompts: int) -> "Ready":
        """Prompts, answers and features in `home`, made where they are missing."""
        target = demo_target(demo_dtype())
        recipe = quality_recipe(target, home / "prompts", 1.0, answer_tokens, [])
        counts = {"train": train_prompts, "validation": 24, "test": test_prompts}
        prepared, base = prepare_once(target, recipe, home, counts)
        prompts = load_prompts(recipe.data.test, target, Chat.of(recipe), test_prompts, 0)
        return cls(target, home, recipe, prepared, base, [list(one.ids) for one in prompts])

    def batches(self, seed: int, tokens: int) -> list[list[int]]:
        """Those of a run with this seed."""
        return batches_of(self.prepared.rows["train"], self.recipe.training.max_tokens_per_batch, seed, tokens)


def tau(found: dict[str, list[int]]) -> float:
    """Acceptance length, pooled over the prompts."""
    return 1 + sum(found["accepted"]) / sum(found["iterations"])


def batches_of(rows: list[dict[str, Any]], budget: int, seed: int, tokens: int) -> list[list[int]]:
    """The first batches of our trainer's first epoch that hold at least so many tokens; RunError for too few rows."""
    lengths, seen, out = [len(row["input_ids"]) for row in rows], 0, []
    for batch in TokenBudgetSampler(lengths, budget, 1, seed):
        if seen >= tokens:
            return out
        out.append(batch)
        seen += sum(lengths[i] for i in batch)
    if seen < tokens:
        raise RunError(f"The training rows hold {seen} tokens, --tokens is {tokens}. Mend: more --train-prompts.")
    return out


def ours_recipe(target: Target, prompts: Path, answer: int, seed: int, steps: int) -> Recipe:
    """The demo's recipe for so many steps; the last draft is kept, as the peer's."""
    each = ["eval_steps", "acceptance_steps", "save_steps", "max_steps"]
    changes = [f"training.seed={seed}", "training.max_minutes=null", *(f"training.{name}={steps}" for name in each)]
    return override_recipe(quality_recipe(target, prompts, 1.0, answer, []), changes)


@torch.no_grad()
def write_data(prepared: Prepared, recipe: Recipe, target: Target, folder: Path) -> None:
    """rows.safetensors: all training rows one after the other as they are stored, `starts` [R + 1]; target.safetensors:
    embeddings [V, Ht], head rows [Vd, Ht] and the final norm's effective weight [Ht], fp32.
    """
    rows, source = prepared.rows["train"], prepared.source(recipe, target, "train")
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("input_ids", "loss_mask", "features", "last_hidden")}
    for row in rows:
        batch = source.attach(Batch(**collate([row])))
        for name, found in parts.items():
            found.append(getattr(batch, name)[0])
    tensors = {name: torch.cat(found) for name, found in parts.items()}
    lengths = torch.tensor([0, *(len(row["input_ids"]) for row in rows)])
    _save({**tensors, "starts": lengths.cumsum(0)}, folder / "rows.safetensors")
    head = target.head(torch.tensor(prepared.vocab.ids))
    own = {
        "embed_tokens": target.embed_weight,
        "head": head.weight,
        "final_norm": head.normed(torch.ones(1, target.hidden_size))[0],
    }
    _save({name: tensor.detach().float() for name, tensor in own.items()}, folder / "target.safetensors")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Written beside its name and renamed."""
    beside = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
    beside.replace(path)


def peer_case(target: Target, prepared: Prepared, folder: Path, seed: int, batches: list[list[int]]) -> dict[str, Any]:
    """What scripts/peer_train.py is told; the layer's sizes are what the peer takes from this target's config."""
    config = target.config
    layer = {
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope()["rope_theta"]},
    }
    return {
        "data": str(folder / "rows.safetensors"),
        "target": str(folder / "target.safetensors"),
        "layer": layer,
        "architectures": list(config.architectures or ["Gemma3ForCausalLM"]),
        "feature_layers": prepared.layers,
        "draft_ids": [int(word) for word in prepared.vocab.ids],
        "seed": seed,
        "bf16": target.dtype == torch.bfloat16,
        "batches": batches,
        "output": str(folder / f"peer-{seed}.part"),
    }


def train_peer(case: dict[str, Any], folder: Path) -> None:
    """Train the peer's module in its own environment, unless that is done. RunError where it fails."""
    seed = case["seed"]
    done = folder / f"peer-{seed}"
    if done.exists():
        return
    told = folder / f"case-{seed}.json"
    write_json(told, case)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([PEER_PYTHON, SCRIPT, told], stdout=subprocess.PIPE, text=True, env=environment)
    if result.returncode:
        raise RunError(f"{SCRIPT.name} ended with status {result.returncode}. Its words are above.")
    write_json(folder / f"peer-{seed}.json", json.loads(result.stdout.splitlines()[-1]))
    Path(case["output"]).rename(done)


def take_over(folder: Path, seed: int, target: Target) -> Path:
    """The peer's checkpoint, checked and in the engines' form. RunError where vLLM would not serve it as trained."""
    saved, ours = folder / f"peer-{seed}", folder / f"peer-{seed}-converted"
    (verdict,) = check_draft(saved, target.name, "vllm").engines
    if verdict.verdict != "PASS":
        raise RunError(f"drafttrain check says {verdict.verdict} of {saved}: {verdict.findings}")
    if not ours.exists():
        convert_draft(str(saved), "ours", ours, target.name)
    return ours


def counts_of(draft, target: Target, prompts: list[list[int]], sampling: Sampling, new: int) -> dict[str, list[int]]:
    """Accepted drafts and iterations of each prompt."""
    out: dict[str, list[int]] = {"accepted": [], "iterations": []}
    for first in range(0, len(prompts), GROUP):
        group = prompts[first : first + GROUP]
        numbers = range(first, first + len(group))
        found = generate(
            target, group, draft.proposer(target), k=K, sampling=sampling, max_new_tokens=new, requests=numbers
        )
        for one in found.generations:
            out["accepted"].append(one.counts.accepted)
            out["iterations"].append(one.counts.iterations)
    return out


def pooled(counts: dict[str, dict[str, list[int]]], side: str, seeds: list[int]) -> tuple[list[int], list[int]]:
    """Accepted and iterations of each prompt, summed over the seeds."""
    runs = [counts[f"{side}-{seed}"] for seed in seeds]
    return tuple(
        [sum(values) for values in zip(*(run[name] for run in runs), strict=True)]
        for name in ("accepted", "iterations")
    )


def difference(counts: dict[str, dict[str, list[int]]], seeds: list[int]) -> tuple[float, list[float]]:
    """tau of ours less tau of the peer's over all seeds, and its 95% interval."""
    a, b = (pooled(counts, side, seeds) for side in SIDES)
    return sum(a[0]) / sum(a[1]) - sum(b[0]) / sum(b[1]), bootstrap_difference(*a, *b)


def table(counts: dict[str, dict[str, dict[str, list[int]]]], seeds: list[int]) -> Table:
    """tau of each side and seed with its interval over prompts, in each mode."""
    out = Table("side", "seed", *(f"tau at K = {K}, {mode} [95%]" for mode in counts))
    for side in SIDES:
        for seed in seeds:
            cells = []
            for found in counts.values():
                one = found[f"{side}-{seed}"]
                low, high = bootstrap_ratio(one["accepted"], one["iterations"], offset=1.0)
                cells.append(f"{tau(one):.3f} [{low:.2f}, {high:.2f}]")
            out.add_row(side, str(seed), *cells)
    return out


def main(
    output: Annotated[Path, typer.Option(help="Folder of runs and counts.")] = Path("checkpoints/bench-peer"),
    data: Data = None,
    seeds: Annotated[int, typer.Option(help="Runs of each side.", min=1)] = 3,
    tokens: Tokens = 150_000,
    train_prompts: TrainPrompts = 1200,
    answer_tokens: AnswerTokens = 112,
    test_prompts: TestPrompts = 64,
    max_new_tokens: NewTokens = 64,
) -> None:
    """Train both sides with every seed, measure them together; a table and a line for each mode."""
    quiet_libraries()
    if not PEER_PYTHON.exists():
        raise RunError(f"{PEER_PYTHON} is missing: the peer has an environment of its own. Mend: make peer")
    output = output.absolute()
    folder = output / "peer"
    folder.mkdir(parents=True, exist_ok=True)
    ready = Ready.make((data or output).absolute(), train_prompts, answer_tokens, test_prompts)
    target = ready.target
    if not all((folder / f"{name}.safetensors").exists() for name in ("rows", "target")):
        write_data(ready.prepared, ready.recipe, target, folder)
    chosen = list(range(seeds))
    for seed in chosen:
        batches = ready.batches(seed, tokens)
        recipe = ours_recipe(target, ready.home / "prompts", answer_tokens, seed, len(batches))
        run_variant(f"ours-{seed}", recipe, ready.base, output, target)
        train_peer(peer_case(target, ready.prepared, folder, seed, batches), folder)
    sources = {f"ours-{seed}": output / f"ours-{seed}" for seed in chosen}
    sources |= {f"peer-{seed}": take_over(folder, seed, target) for seed in chosen}
    found = {mode: measured(output, mode, sources, ready, max_new_tokens, tokens) for mode in SAMPLINGS}
    console = Console(width=150)
    console.print(table(found, chosen))
    worse = False
    for mode, one in found.items():
        value, (low, high) = difference(one, chosen)
        worse |= high < 0
        console.print(
            f"{mode}: ours less the peer's {value:+.3f} [{low:+.3f}, {high:+.3f}], {seeds} seeds", highlight=False
        )
    if worse:
        sys.exit(1)


def measured(
    output: Path, mode: str, sources: dict[str, Path], ready: Ready, new: int, tokens: int
) -> dict[str, dict[str, list[int]]]:
    """The counts of each draft in this mode, kept in output/counts.json."""
    path = output / "counts.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    keys = {name: f"{mode}, {name}, {len(ready.prompts)} prompts, {new} new, {tokens} tokens" for name in sources}
    for name, key in keys.items():
        if key not in kept:
            draft = load_draft(sources[name], ready.target)
            kept[key] = counts_of(draft, ready.target, ready.prompts, SAMPLINGS[mode], new)
            write_json(path, kept)
    return {name: kept[key] for name, key in keys.items()}


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
