"""Plan's memory estimate against the peak that training really reaches, for an EAGLE-3, a Medusa and a distillation
recipe on random weights.

    python scripts/bench_plan.py                 # CPU, some minutes, below 2 GiB; --json for one JSON object

Measured: a process of its own for each recipe loads the target, prepares, trains two steps (the second has the
optimizer's states) and saves. The figure is the rise of its resident set's high-water mark over what it held right
before the target was loaded, the libraries' scratch space included (Linux: VmHWM, reset through clear_refs). glibc is
told to hand back what is freed (MALLOC_MMAP_THRESHOLD_): by default it keeps holes between tensors below 32 MiB, which
belong to its heap and not to the training. Estimated: `drafttrain plan` from the recipe and the target's config. Exit
status 1 where one is off by more than 15%.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from drafttrain.cli import run_command
from drafttrain.errors import UserError

WITHIN = 0.15
MIB = 2**20
RETURNED = 2**16
"""Bytes of a block from which on glibc hands it back at once."""
WORDS = 32000
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LENGTH, TOKENS = 512, 4096
RECIPES = {
    "eagle3": {"method": "eagle3", "data": {"draft_vocab": 8192}, "training": {"ttt_steps": 4}},
    "medusa": {
        "method": "medusa",
        "data": {"draft_vocab": None},
        "draft": {"num_heads": 3, "own_heads": True},
        "training": {"max_tokens_per_batch": 1024},
    },
    "kd": {"method": "kd", "draft": {"student": "pruned", "num_hidden_layers": 4, "choose_layers": "even"}},
}


def write_target(folder: Path, sizes: dict = SIZES, seed: int = 0) -> Path:
    """A Llama of random bf16 weights and a tokenizer of as many words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = [*specials, *(f"w{i}" for i in range(sizes["vocab_size"] - len(specials)))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), specials, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    return folder


def write_recipe(folder: Path, name: str, tokens: int = TOKENS, length: int = LENGTH, words: int = WORDS) -> Path:
    """A recipe on rows of token ids that fill one batch of `tokens` exactly."""
    own = RECIPES[name]
    training = {"max_steps": 2, "max_tokens_per_batch": tokens, "warmup_steps": 0, "logging_steps": 1}
    training |= own.get("training", {})
    rows = training["max_tokens_per_batch"] // length
    draw, data = random.Random(0), folder / f"{name}.jsonl"
    ids = [[draw.randrange(4, words) for _ in range(length)] for _ in range(rows)]
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    sections = {"train": [{"path": str(data)}], "max_length": length} | own.get("data", {})
    recipe = {**own, "target": str(folder / "target"), "data": sections, "training": training}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def resident(name: str) -> int:
    """Bytes of VmRSS or VmHWM."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def train_measured(path: Path) -> int:
    """Bytes that a whole training takes at most above those held before its target is loaded; in this process."""
    from drafttrain.data.run_folder import RunFolder
    from drafttrain.recipe import load_recipe
    from drafttrain.training.run import train

    recipe, run = load_recipe(path), RunFolder(path.with_suffix(""))
    run.claim(recipe)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train(recipe, run, say=lambda message: print(message, file=sys.stderr, flush=True))
    return resident("VmHWM") - before


def compare(path: Path, name: str) -> dict:
    """{"recipe", "measured", "estimated" [bytes], "error", "moment", "parts"} of one recipe."""
    from drafttrain.plan_cost import plan_cost
    from drafttrain.recipe import load_recipe

    command = [sys.executable, __file__, "--child", str(path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(RETURNED)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise UserError(f"training {name} ended with {done.returncode}; its messages stand above")
    measured = json.loads(done.stdout.strip().splitlines()[-1])["bytes"]
    found = plan_cost(load_recipe(path), device="cpu", rates=False)["memory"]["alone"]
    error = found["peak"] / measured - 1
    return {
        "recipe": name,
        "measured": measured,
        "estimated": found["peak"],
        "error": error,
        "moment": found["moment"],
        "parts": found["parts"],
    }


def main(
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    only: Annotated[str | None, typer.Option(help=f"One recipe of {', '.join(RECIPES)}.")] = None,
) -> None:
    """Estimate, train, compare."""
    if child is not None:
        print(json.dumps({"bytes": train_measured(child)}))
        return
    if not Path("/proc/self/clear_refs").exists():
        raise UserError("there is no /proc/self/clear_refs to reset the high-water mark with. Mend: run it on Linux")
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder) / "target")
        rows = [compare(write_recipe(Path(folder), name), name) for name in ([only] if only else RECIPES)]
    if as_json:
        print(json.dumps({"recipes": rows, "within": WITHIN}))
    else:
        table = Table("recipe", "measured MiB", "estimated MiB", "error", "peak at", box=None)
        for row in rows:
            sizes = (f"{row[key] / MIB:,.0f}" for key in ("measured", "estimated"))
            table.add_row(row["recipe"], *sizes, f"{row['error']:+.1%}", row["moment"])
        Console(width=100).print(table)
    if any(abs(row["error"]) > WITHIN for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
