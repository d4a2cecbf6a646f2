"""How much of what the target says a draft vocabulary of each size holds, over all data and by domain: the ceiling it
sets on acceptance. See FR-Spec, arXiv 2502.14856.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.data.vocab import DraftVocab, ranked_ids

SIZES = tuple(1024 * 2**i for i in range(8))
DEPTH = 4
"""Drafts a round of the acceptance length that is told."""
MOST_DOMAINS = 20
ALL, OTHERS = "all", "(others)"
CHUNK = 2_000_000


def coverage_table(vocab: DraftVocab, rows: dict[str, list[dict]], vocab_size: int, keep_ids: Collection[int]) -> dict:
    """{"sizes", "chosen", "depth", "splits"}: for each split and domain "tokens" (supervised ones), "coverage" and
    "length" of the vocabularies that `build_draft_vocab` makes of the training rows in each size (the last one: all
    words), and of the one in use ("chosen_coverage", "chosen_length").

    coverage: share of supervised tokens that are in it, the ceiling on acceptance of one draft. length: 1 + the shares
    of windows of 1 to DEPTH supervised tokens that are wholly in it, the ceiling on the acceptance length at K = DEPTH.
    """
    sizes = [size for size in SIZES if len(keep_ids) <= size < vocab_size] + [vocab_size]
    ids = ranked_ids([(row["input_ids"], row["loss_mask"]) for row in rows["train"]], vocab_size, keep_ids)
    ranks = torch.empty(vocab_size, dtype=torch.long)
    ranks[ids] = torch.arange(vocab_size)
    outside = torch.ones(vocab_size, dtype=torch.long)
    outside[vocab.ids] = 0
    splits = {split: _by_domain(rows[split], ranks, outside, sizes) for split in rows}
    return {"sizes": sizes, "chosen": len(vocab.ids), "depth": DEPTH, "splits": splits}


def _by_domain(rows: Sequence[dict], ranks: Tensor, outside: Tensor, sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    domains: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        domains[row["domain"]].append(row)
    counts = {name: _counts(domains[name], ranks, outside, sizes) for name in domains}
    largest = sorted(counts, key=lambda name: (-int(counts[name][0, 0]), name))
    shown = {ALL: sum(counts.values())}
    if len(counts) > 1:
        shown |= {name: counts[name] for name in largest[:MOST_DOMAINS]}
        if len(largest) > MOST_DOMAINS:
            shown[OTHERS] = sum(counts[name] for name in largest[MOST_DOMAINS:])
    return {name: _figures(found) for name, found in shown.items() if found[0, 0]}


def _figures(counts: Tensor) -> dict[str, Any]:
    shares = counts[:, 1:] / counts[:, :1].clamp_min(1)
    coverage, length = shares[0].tolist(), (1 + shares.sum(0)).tolist()
    return {
        "tokens": int(counts[0, 0]),
        "coverage": coverage[1:],
        "length": length[1:],
        "chosen_coverage": coverage[0],
        "chosen_length": length[0],
    }


def _counts(rows: Sequence[dict], ranks: Tensor, outside: Tensor, sizes: Sequence[int]) -> Tensor:
    """int64 [DEPTH, 2 + sizes]: of windows of k + 1 supervised tokens how many there are, how many of them the chosen
    vocabulary holds, and how many the vocabulary of each size.
    """
    total = torch.zeros(DEPTH, 2 + len(sizes), dtype=torch.long)
    limits = torch.tensor(sizes)
    for tokens, supervised in _chunks(rows):
        rarest = ranks[tokens]
        missing, whole = outside[tokens], supervised
        for k in range(DEPTH):
            if k:
                rarest = torch.maximum(rarest[:-1], ranks[tokens[k:]])
                missing = torch.maximum(missing[:-1], outside[tokens[k:]])
                whole = whole[:-1] & supervised[k:]
            found = rarest[whole]
            total[k, 0] += len(found)
            total[k, 1] += int((missing[whole] == 0).sum())
            total[k, 2:] += torch.searchsorted(found.sort().values, limits)
    return total


def _chunks(rows: Sequence[dict]) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and loss mask of many rows behind each other, a token without supervision between two rows."""
    ids: list[int] = []
    mask: list[int] = []
    for row in rows:
        ids += [*row["input_ids"], 0]
        mask += [*row["loss_mask"], 0]
        if len(ids) > CHUNK:
            yield torch.tensor(ids), torch.tensor(mask).bool()
            ids, mask = [], []
    if ids:
        yield torch.tensor(ids), torch.tensor(mask).bool()


def coverage_lines(table: dict[str, Any]) -> list[str]:
    """The table for people: a line for each split and domain, percent of tokens and, in brackets, acceptance length."""
    heads = [*(_short(size) for size in table["sizes"][:-1]), "whole", f"this ({_short(table['chosen'])})"]
    named = [
        (split if name == ALL else f"  {name}", figures)
        for split, domains in table["splits"].items()
        for name, figures in domains.items()
    ]
    width = min(28, max(len(name) for name, _ in named))
    lines = [
        f"ceiling on acceptance by draft vocabulary (in brackets: acceptance length at K = {table['depth']})",
        f"{'':{width}} {'tokens':>11}" + "".join(f"{head:>15}" for head in heads),
    ]
    for name, figures in named:
        shares = [*figures["coverage"], figures["chosen_coverage"]]
        lengths = [*figures["length"], figures["chosen_length"]]
        pairs = zip(shares, lengths, strict=True)
        cells = "".join(f"{f'{share:.1%} ({length:.2f})':>15}" for share, length in pairs)
        lines.append(f"{name[:width]:{width}} {figures['tokens']:>11,}{cells}")
    return lines


def _short(size: int) -> str:
    return f"{size // 1024}k" if size % 1024 == 0 else f"{size:,}"
