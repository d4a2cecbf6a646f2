"""Batches of similar length under a token budget, the same for every world size, and the collator that labels them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from drafttrain.data.conversations import DataError
from drafttrain.drafts.base import supervised_rows


class TokenBudgetSampler:
    """Yields lists of row indices whose padded size, rows x longest row, stays within `max_tokens`.

    Every epoch is shuffled anew from (seed, epoch). Rows are sorted by length class (steps of an eighth at most) and
    packed at the longest length of their class, so batches hold rows of similar length and their number is the same
    in every epoch, which the Trainer counts on for its steps and for finding its place when it resumes. The batches and
    their order are those of one process; with more the last ones are silent (`Rows`): a multiple of `world_size`
    in all. Raises DataError when a row is longer than the budget.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, world_size: int = 1, seed: int = 0):
        if not lengths:
            raise DataError("no rows to train on; check data.train")
        longest = max(lengths)
        if longest > max_tokens:
            raise DataError(
                f"row {list(lengths).index(longest)} has {longest} tokens, training.max_tokens_per_batch is "
                f"{max_tokens}; raise it, or lower data.max_length"
            )
        self.lengths, self.max_tokens = list(lengths), max_tokens
        self.world_size, self.seed, self.epoch = world_size, seed, 0
        longest_of: dict[int, int] = {}
        for length in self.lengths:
            longest_of[_class(length)] = max(length, longest_of.get(_class(length), 0))
        self._packed = [longest_of[_class(length)] for length in self.lengths]
        self._cached: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (0, 1, ..)."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())

    def batches(self) -> list[list[int]]:
        """All batches of the current epoch, in order."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = (self.epoch, self._build())
        return self._cached[1]

    def _build(self) -> list[list[int]]:
        rng = random.Random(f"{self.seed}:{self.epoch}")
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        order.sort(key=self._packed.__getitem__)  # Stable: random within a length class.
        batches = self._pack(order)
        rng.shuffle(batches)
        shortest = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        return batches + [[~shortest]] * (-len(batches) % self.world_size)

    def _pack(self, rows: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * self._packed[row] > self.max_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches


class Rows(Dataset):
    """Rows by index; ~index is the same row with nothing in it supervised: it counts and teaches nothing."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index >= 0:
            return self.rows[index]
        row = self.rows[~index]
        return {**row, "loss_mask": [0] * len(row["loss_mask"])}


def _class(length: int) -> int:
    """Lengths of one class differ by less than an eighth: 16..17, 18..19, .. 32..35, 36..39, .."""
    step = 1 << max(0, length.bit_length() - 4)
    return length // step * step


def row_name(row: dict) -> str:
    """A prepared row for people: "train.jsonl:12", or its place among the rows."""
    return row["source"] or f"row {row['index']}"


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Rows {"index", "input_ids", "loss_mask"} -> right-padded tensors of `drafts.base.Batch`, as a dict.

    labels[b, p] = x[p+2] where row p is trained at step 0 (x[p+1] and x[p+2] supervised), else -100: transformers'
    Trainer counts them, which makes its num_items_in_batch the number of step-0 rows over all ranks and accumulation
    steps.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    T = int(lengths.max())
    input_ids = torch.zeros(len(rows), T, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), T, dtype=torch.bool)
    for i, row in enumerate(rows):
        input_ids[i, : lengths[i]] = torch.as_tensor(row["input_ids"])
        loss_mask[i, : lengths[i]] = torch.as_tensor(row["loss_mask"]).bool()
    valid = supervised_rows(loss_mask, 1)[0]
    labels = input_ids.roll(-2, 1).masked_fill(~valid, -100)
    index = torch.tensor([row["index"] for row in rows])
    return {"input_ids": input_ids, "loss_mask": loss_mask, "lengths": lengths, "labels": labels, "index": index}
