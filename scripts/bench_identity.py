"""Greedy speculative text equals plain greedy text, token by token, in fp32 on a real model: Gemma 3 270M.

    python scripts/bench_identity.py --draft checkpoints/demo

32 prompts x 128 new tokens, n-gram lookup and an EAGLE-3 draft (default: an untrained one) at K = 3 and 5. Prints a
line for each configuration, then the total; exits with 1 on any difference. A quarter of an hour on two CPU cores.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from drafttrain.cli import run_command
from drafttrain.data.features import OnlineFeatures, channel_statistics
from drafttrain.demo import PROMPTS, demo_recipe, demo_target, prompt_folder
from drafttrain.drafts.base import Draft, Proposer
from drafttrain.drafts.loading import load_draft, new_draft
from drafttrain.drafts.ngram import NgramProposer
from drafttrain.evaluate.divergence import first_divergence
from drafttrain.evaluate.run import load_prompts
from drafttrain.recipe import DataEntry
from drafttrain.specdec.decode import generate
from drafttrain.specdec.metrics import Counts
from drafttrain.target import Target, default_feature_layers, load_target

BATCH = 32


def untrained_draft(target: Target, folder: Path, prompts: list[list[int]]) -> Draft:
    """A draft as training starts it: whole vocabulary, the target's head rows, measured feature scales."""
    layers = default_feature_layers(target.num_layers)
    rows = [{"index": i, "input_ids": ids, "loss_mask": [1] * len(ids)} for i, ids in enumerate(prompts)]
    statistics = channel_statistics(OnlineFeatures(target, layers, target.dtype), target, rows)
    recipe = demo_recipe(target, folder, 1)
    return new_draft(recipe, target, layers, torch.arange(target.vocab_size), statistics).eval()


def texts(target: Target, prompts, proposer: Proposer | None, k: int, count: int) -> tuple[list[list[int]], Counts]:
    """New tokens of each prompt, and the pooled counts; prompts in batches of 32."""
    tokens, counts = [], Counts()
    for start in range(0, len(prompts), BATCH):
        done = generate(target, prompts[start : start + BATCH], proposer, k=k, max_new_tokens=count)
        tokens += [generation.tokens for generation in done.generations]
        counts.add(done.counts)
    return tokens, counts


def compare(target: Target, prompts, draft: Draft, ks: list[int], count: int) -> Iterator[int]:
    """Print a line for each configuration; yields its number of prompts that differ."""
    start = time.monotonic()
    plain, counts = texts(target, prompts, None, 1, count)
    print(f"plain: {counts.emitted} tokens in {time.monotonic() - start:.0f} s", flush=True)
    for name, proposer in (("n-gram", NgramProposer()), ("eagle3", draft.proposer(target))):
        for k in ks:
            start = time.monotonic()
            found, counts = texts(target, prompts, proposer, k, count)
            pairs = [(i, a, b) for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b]
            tau = counts.mean_acceptance_length
            seconds = time.monotonic() - start
            print(
                f"{name} K={k}: {len(prompts) - len(pairs)} of {len(prompts)} prompts identical, "
                f"acceptance length {tau:.2f}, {counts.emitted} tokens in {seconds:.0f} s",
                flush=True,
            )
            for i, ours, theirs in pairs:
                print(f"  prompt {i}: {first_divergence(target, prompts[i], ours, theirs)}")
            yield len(pairs)


def main(
    draft: Annotated[str | None, typer.Option(help="Draft folder, run folder or hub id. Default: untrained.")] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts, 36 at most.", min=1, max=36)] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens for each prompt.", min=1)] = 128,
    k: Annotated[list[int] | None, typer.Option(help="Drafts a round; may be given several times.")] = None,
) -> None:
    """Compare greedy texts of every draft with plain decoding's, in fp32."""
    stored = demo_target()
    folder = prompt_folder(stored)
    target = load_target(str(stored.folder), dtype="float32")
    entries = [DataEntry(path=str(folder / f"{split}.jsonl")) for split in ("validation", "test")]
    chosen = [list(prompt.ids) for prompt in load_prompts(entries, target, "auto", prompts, 0)]
    assert len(chosen) == prompts <= PROMPTS["validation"] + PROMPTS["test"]
    loaded = load_draft(draft, target) if draft else untrained_draft(target, folder, chosen)
    print(f"{stored.title} in fp32, {prompts} prompts x {max_new_tokens} tokens, draft: {draft or 'untrained'}")
    different = list(compare(target, chosen, loaded, k or [3, 5], max_new_tokens))
    total = len(different) * prompts
    print(f"total: {total - sum(different)} of {total} texts identical to plain decoding")
    if any(different):
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
