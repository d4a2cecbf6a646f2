"""What a draft learns from: the target's features, last hidden states and full-vocabulary statistics, online or from
a store.

A FeatureSource owns the frozen target (or its stored output) and attaches to each batch what the draft's forward needs.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.data.batching import collate
from drafttrain.data.conversations import DataError
from drafttrain.data.files import write_beside, write_json
from drafttrain.drafts.base import Batch
from drafttrain.target import Target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_TOKENS = 50_000


class FeatureSource(ABC):
    """attach(batch) fills features, last_hidden, target_lse and target_argmax of a Batch."""

    @abstractmethod
    def attach(self, batch: Batch) -> Batch:
        """A copy of the batch with the target's tensors; see drafts.base.Batch for shapes."""


class OnlineFeatures(FeatureSource):
    """Runs the target on each batch, under no_grad (not inference_mode: the draft's backward reads these tensors)."""

    def __init__(self, target: Target, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16):
        self.target, self.layers, self.dtype = target, list(layers), dtype
        self._head = target.head()

    @torch.no_grad()
    def attach(self, batch: Batch) -> Batch:
        n = self.target.num_layers
        states = self.target.hidden_states(batch.input_ids, batch.lengths, sorted({*self.layers, n}))
        last = states[n]
        needed = batch.loss_mask.roll(-1, 1).bool()
        needed[:, -1] = False
        needed = needed.to(last.device)
        lse = torch.zeros(last.shape[:2], dtype=torch.float32, device=last.device)
        argmax = torch.zeros(last.shape[:2], dtype=torch.long, device=last.device)
        lse[needed], argmax[needed] = teacher_statistics(self._head, last[needed])
        return replace(
            batch,
            features=torch.cat([states[k].to(last.device) for k in self.layers], -1).to(self.dtype),
            last_hidden=last.to(self.dtype),
            target_lse=lse,
            target_argmax=argmax,
        )


def teacher_statistics(head, last_hidden: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Full-vocabulary log-sum-exp fp32 [R] and argmax int64 [R] of un-normed last hidden states [R, Ht], a chunk at a
    time.
    """
    lse, argmax = [], []
    for part in last_hidden.split(chunk):
        logits = head(part)
        largest, index = logits.max(-1)
        shifted = logits.float().sub_(largest.float()[:, None]).exp_()
        lse.append(shifted.sum(-1).log() + largest.float())
        argmax.append(index)
    if not lse:
        empty = last_hidden.new_zeros(0)
        return empty.float(), empty.long()
    return torch.cat(lse), torch.cat(argmax)


@dataclass(frozen=True)
class StoreKey:
    """What stored features belong to: another target, data or layer list makes them useless."""

    target_fingerprint: str
    layers: tuple[int, ...]
    dtype: str
    rows_sha256: str


class StoredFeatures(FeatureSource):
    """Reads a store written by `write_store`: memory-mapped shards, one slice a row.

    Raises DataError when the store is missing, unfinished, damaged, or belongs to another target, data or layers.
    """

    def __init__(self, folder: Path, key: StoreKey, rows: int):
        self.folder = folder
        manifest = _read_manifest(folder, key)
        if manifest is None or sum(shard["rows"] for shard in manifest["shards"]) != rows:
            raise DataError(
                f"{folder}: the stored features are missing or not complete; run `drafttrain prepare` again"
            )
        self._places: list[tuple[str, int, int]] = []
        for shard in manifest["shards"]:
            start = 0
            for length in shard["lengths"]:
                self._places.append((shard["file"], start, start + length))
                start += length
        self._open: dict[str, safe_open] = {}

    def attach(self, batch: Batch) -> Batch:
        T = batch.input_ids.shape[1]
        found = [self._row(int(index)) for index in batch.index]
        tensors = {}
        for name in ("features", "last_hidden", "target_lse", "target_argmax"):
            out = found[0][name].new_zeros(len(found), T, *found[0][name].shape[1:])
            for i, row in enumerate(found):
                out[i, : len(row[name])] = row[name]
            tensors[name] = out
        tensors["target_argmax"] = tensors["target_argmax"].long()
        device = batch.input_ids.device
        return replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def _row(self, index: int) -> dict[str, Tensor]:
        file, start, end = self._places[index]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / file} is missing or damaged ({error}); delete the file and run `drafttrain "
                    "prepare` again"
                ) from error
        shard = self._open[file]
        return {name: shard.get_slice(name)[start:end] for name in shard.keys()}  # noqa: SIM118


def write_store(
    folder: Path,
    key: StoreKey,
    source: OnlineFeatures,
    rows: Sequence[dict],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the features of all rows into shards of about 50,000 tokens, then the manifest; resumes behind the last
    whole shard.

    progress is told the tokens done so far. 2 x (A + 1) x Ht bytes a token in a 2-byte dtype, plus 8.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _read_manifest(folder, key) or {"key": _plain(key), "shards": []}
    manifest["shards"] = list(takewhile(lambda shard: (folder / shard["file"]).exists(), manifest["shards"]))
    done = sum(shard["rows"] for shard in manifest["shards"])
    tokens = sum(sum(shard["lengths"]) for shard in manifest["shards"])
    while done < len(rows):
        count, size = 0, 0
        while done + count < len(rows) and (count == 0 or size < SHARD_TOKENS):
            size += len(rows[done + count]["input_ids"])
            count += 1
        parts: dict[int, dict[str, Tensor]] = {}
        for batch_rows in _length_batches(rows, range(done, done + count), batch_tokens):
            batch = source.attach(Batch(**collate([rows[i] for i in batch_rows])))
            for b, row in enumerate(batch_rows):
                parts[row] = {name: _stored(batch, name)[b, : batch.lengths[b]] for name in STORED}
            tokens += int(batch.lengths.sum())
            if progress is not None:
                progress(tokens)
        file = f"shard-{len(manifest['shards']):05d}.safetensors"
        tensors = {name: torch.cat([parts[row][name] for row in sorted(parts)]).cpu().contiguous() for name in STORED}
        write_beside(folder / file, lambda path, tensors=tensors: save_file(tensors, path))
        lengths = [len(rows[i]["input_ids"]) for i in range(done, done + count)]
        manifest["shards"].append({"file": file, "rows": count, "lengths": lengths})
        write_json(folder / "manifest.json", manifest)
        done += count


STORED = ("features", "last_hidden", "target_lse", "target_argmax")


def _stored(batch: Batch, name: str) -> Tensor:
    tensor = {
        "features": batch.features,
        "last_hidden": batch.last_hidden,
        "target_lse": batch.target_lse,
        "target_argmax": batch.target_argmax,
    }[name]
    return tensor.int() if name == "target_argmax" else tensor


def _length_batches(rows: Sequence[dict], indices: Sequence[int], budget: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in sorted(indices, key=lambda i: len(rows[i]["input_ids"])):
        if batch and (len(batch) + 1) * len(rows[index]["input_ids"]) > budget:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _plain(key: StoreKey) -> dict:
    return {
        "target_fingerprint": key.target_fingerprint,
        "layers": list(key.layers),
        "dtype": key.dtype,
        "rows_sha256": key.rows_sha256,
    }


def _read_manifest(folder: Path, key: StoreKey) -> dict | None:
    path = folder / "manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text())
    wrong = [name for name, value in _plain(key).items() if manifest["key"].get(name) != value]
    if wrong:
        raise DataError(
            f"{folder}: the stored features were made for another {', '.join(wrong)} "
            f"({', '.join(str(manifest['key'].get(name))[:40] for name in wrong)}); "
            "remove the folder or start a fresh run with --fresh"
        )
    return manifest


@torch.no_grad()
def channel_statistics(source: FeatureSource, target: Target, rows: Sequence[dict], max_tokens: int = 20_000) -> dict:
    """feature_rms fp32 [A*Ht] and final_rms fp32 [Ht]: rms of each channel of the features and of norm(hs[n]).

    Over rows spread evenly through the data, position 0 of each row left out: a BOS is an attention sink whose
    features are far off scale. Some channels of real targets are thousands of times the median, hence a static scale
    for each.
    """
    total = sum(len(row["input_ids"]) for row in rows)
    stride = max(1, total // max_tokens)
    head = target.head()
    squares = final_squares = count = 0
    for row in rows[::stride]:
        batch = source.attach(Batch(**collate([row])))
        squares = squares + batch.features[0, 1:].double().square().sum(0)
        final_squares = final_squares + head.normed(batch.last_hidden[0, 1:]).double().square().sum(0)
        count += batch.input_ids.shape[1] - 1
    if not count:
        raise DataError("every row has a single token: nothing to measure the features on; check data.train")
    return {
        "feature_rms": (squares / count).sqrt().float().clamp_min(1e-6).cpu(),
        "final_rms": (final_squares / count).sqrt().float().clamp_min(1e-6).cpu(),
    }
