"""What the target says about each row, on the disk: memory-mapped safetensors shards of about 50,000 tokens and a
manifest of what they belong to.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.data.batching import collate
from drafttrain.data.conversations import DataError
from drafttrain.data.features import DTYPES, PADDING, FeatureSource, OnlineFeatures, finite_rows
from drafttrain.data.files import write_beside, write_json
from drafttrain.drafts.base import Batch

SHARD_TOKENS = 50_000
GIB = 2**30
MOST_GIB = 50
"""More than this is written only when that was confirmed; so is more than half of what the disk has free."""


class Key(ABC):
    """What a store on the disk belongs to, a frozen dataclass of plain values; `tensors` names what its shards hold
    of a Batch.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[str, ...]:
        """The fields of a Batch that are stored and attached; int64 is stored as int32."""

    @abstractmethod
    def token_bytes(self, hidden_size: int) -> int:
        """See `bytes_per_token`."""

    def plain(self) -> dict:
        """The key as its manifest holds it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class StoreKey(Key):
    """Hidden states: another target, data or layer list makes them useless. Without layers only hs[n] is held, which
    is an exact teacher. A store with statistics serves a key without them.
    """

    target_fingerprint: str
    layers: tuple[int, ...]
    dtype: str
    rows_sha256: str
    statistics: bool = True

    @property
    def tensors(self) -> tuple[str, ...]:
        features = ("features",) if self.layers else ()
        return (*features, "last_hidden", *(("target_lse", "target_argmax") if self.statistics else ()))

    def token_bytes(self, hidden_size: int) -> int:
        """(A + 1) x Ht values of the dtype, and 8 bytes of statistics."""
        return (len(self.layers) + 1) * hidden_size * DTYPES[self.dtype].itemsize + 8 * self.statistics


def bytes_per_token(key: Key, hidden_size: int) -> int:
    """What a token takes on the disk in a store of this key, for a target of hidden size Ht: to be told before it is
    written.
    """
    return key.token_bytes(hidden_size)


class StoredFeatures(FeatureSource):
    """Reads a store written by `write_store`: memory-mapped shards, one slice a row, copied once.

    `skipped` are the rows whose features are not finite. Raises DataError when the store is missing, unfinished,
    damaged, or belongs to another target, data or settings.
    """

    reads_ahead = True

    def __init__(self, folder: Path, key: Key, rows: int):
        self.folder, self.key = folder, key
        shards = (_read_manifest(folder, key) or {"shards": []})["shards"]
        self._places: list[tuple[str, int, int]] = []
        for shard in shards:
            start = 0
            for length in shard["lengths"]:
                self._places.append((shard["file"], start, start + length))
                start += length
        self.skipped = frozenset(row for shard in shards for row in shard.get("skipped", ()))
        self._open: dict[str, safe_open] = {}
        self._check(rows)

    def _check(self, rows: int) -> None:
        if len(self._places) != rows:
            raise DataError(
                f"{self.folder}: the stored features are missing or not complete; run `drafttrain prepare` again"
            )

    def attach(self, batch: Batch) -> Batch:
        return batch if _is_read(batch) else self.read(batch)

    def read(self, batch: Batch) -> Batch:
        T = batch.input_ids.shape[1]
        found = [self._row(index) for index in batch.index.tolist()]
        held = next((row for row in found if row is not None), None)
        if held is None:
            return batch
        tensors = {}
        for name in self.key.tensors:
            like = held[name]
            dtype = torch.int64 if like.dtype == torch.int32 else like.dtype
            out = torch.empty(len(found), T, *like.shape[1:], dtype=dtype)
            for i, row in enumerate(found):
                length = len(row[name]) if row is not None else 0
                if row is not None:
                    out[i, :length] = row[name]
                out[i, length:] = PADDING.get(name, 0)
            tensors[name] = out.to(batch.input_ids.device)
        return replace(batch, **tensors)

    def _row(self, index: int) -> dict[str, Tensor] | None:
        assert index >= 0, "a row that the draft went on with is not in the store"
        file, start, end = self._places[index]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / file} is missing or damaged ({error}). Expected a whole shard; the others are "
                    "not touched. Mend: run `drafttrain prepare` again, which writes this shard anew"
                ) from error
        shard = self._open[file]
        return {name: shard.get_slice(name)[start:end] for name in self.key.tensors}


class HybridFeatures(StoredFeatures):
    """The stored rows where a store of the first rows has them, the target itself for all others. Raises DataError for
    a store that is damaged or belongs to something else.
    """

    def __init__(self, folder: Path, key: StoreKey, online: OnlineFeatures):
        self.online = online
        super().__init__(folder, key, 0)

    def _check(self, rows: int) -> None:
        """Any number of rows may be stored."""

    def _row(self, index: int) -> dict[str, Tensor] | None:
        return super()._row(index) if index < len(self._places) else None

    def attach(self, batch: Batch) -> Batch:
        batch = super().attach(batch)
        if not _is_read(batch):
            return self.online.attach(batch)
        rows = (batch.index >= len(self._places)).nonzero()[:, 0]
        if not len(rows):
            return batch
        width = int(batch.lengths[rows].max())
        plain = {name: getattr(batch, name)[rows] for name in ("lengths", "index")}
        plain |= {name: getattr(batch, name)[rows, :width] for name in ("input_ids", "loss_mask", "labels")}
        computed = self.online.attach(Batch(**plain))
        tensors = {name: getattr(batch, name).clone() for name in self.key.tensors}
        for name, whole in tensors.items():
            whole[rows, :width] = getattr(computed, name).to(whole.device)
        return replace(batch, **tensors)


def _is_read(batch: Batch) -> bool:
    return batch.last_hidden is not None or batch.topk_ids is not None


def rows_within(rows: Sequence[dict], bytes_a_token: int, gib: float) -> int:
    """How many rows from the first on take at most so many GiB."""
    left = gib * GIB
    for count, row in enumerate(rows):
        left -= len(row["input_ids"]) * bytes_a_token
        if left < 0:
            return count
    return len(rows)


def rows_listed(folder: Path, key: Key) -> int:
    """How many rows, from the first on, the store's manifest lists. DataError for a store of something else."""
    return sum(shard["rows"] for shard in (_read_manifest(folder, key) or {"shards": []})["shards"])


def check_room(folder: Path, size: int, confirmed: bool, most_gib: float = MOST_GIB) -> None:
    """DataError where `size` bytes do not fit the disk of `folder`, or are more than `most_gib` GiB or half of the free
    space and nobody has confirmed them.
    """
    free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    takes = f"{folder}: the features take {size / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
    less = "features.source online, or hybrid with features.max_gib"
    if size > free:
        raise DataError(f"{takes}. Expected them to fit. Mend: another --output, {less}")
    if not confirmed and (size > most_gib * GIB or size > free / 2):
        limit = f"more than {most_gib:g} GiB" if size > most_gib * GIB else "more than half of it"
        raise DataError(
            f"{takes}: {limit}, which is not written unasked. Mend: `drafttrain prepare --yes` to go on, or {less}"
        )


def rows_missing(folder: Path, key: Key, rows: Sequence[dict]) -> list[int]:
    """The rows that `write_store` would still write. DataError for a store of something else."""
    shards = (_read_manifest(folder, key) or {"shards": []})["shards"]
    parts = [part for number, part in enumerate(_parts(rows, shards)) if not _sound(folder, shards, number, key)]
    return [i for part in parts for i in part]


def tokens_missing(folder: Path, key: Key, rows: Sequence[dict]) -> int:
    """How many tokens `write_store` would still write. DataError for a store of something else."""
    return sum(len(rows[i]["input_ids"]) for i in rows_missing(folder, key, rows))


def write_store(
    folder: Path,
    key: Key,
    source: FeatureSource,
    rows: Sequence[dict],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write what the source attaches to each row, the key's tensors, into shards of about 50,000 tokens, each followed
    by the manifest. Shards that are there and whole stay as they are; missing or damaged ones are written anew.

    progress is told the tokens done so far. A token takes `bytes_per_token` bytes. Rows that are not finite are listed
    in the manifest as "skipped".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):  # Of a process that was killed in the middle of a shard.
        leftover.unlink()
    shards = (_read_manifest(folder, key) or {"shards": []})["shards"]
    manifest = {"key": key.plain(), "shards": shards}
    parts = list(_parts(rows, shards))
    todo = [number for number in range(len(parts)) if not _sound(folder, shards, number, key)]
    tokens = sum(len(row["input_ids"]) for row in rows)
    tokens -= sum(len(rows[i]["input_ids"]) for number in todo for i in parts[number])
    batches = {number: list(_length_batches(rows, parts[number], batch_tokens)) for number in todo}
    source.expected = [i for number in todo for batch in batches[number] for i in batch]
    for number in todo:
        part = parts[number]
        found: dict[int, dict[str, Tensor]] = {}
        skipped = []
        for batch_rows in batches[number]:
            batch = source.attach(Batch(**collate([rows[i] for i in batch_rows])))
            finite = finite_rows(batch).tolist()
            skipped += [row for row, sound in zip(batch_rows, finite, strict=True) if not sound]
            for b, row in enumerate(batch_rows):
                found[row] = {name: getattr(batch, name)[b, : batch.lengths[b]] for name in key.tensors}
            tokens += int(batch.lengths.sum())
            if progress is not None:
                progress(tokens)
        file = f"shard-{number:05d}.safetensors"
        tensors = {name: _stored([found[row][name] for row in part]) for name in key.tensors}
        write_beside(folder / file, lambda path, tensors=tensors: save_file(tensors, path))
        entry = {"file": file, "rows": len(part), "lengths": [len(rows[i]["input_ids"]) for i in part]}
        shards[number : number + 1] = [entry | ({"skipped": sorted(skipped)} if skipped else {})]
        write_json(folder / "manifest.json", manifest)


def _parts(rows: Sequence[dict], shards: Sequence[dict]) -> Iterator[range]:
    """The rows of each shard: of those that the manifest lists, then of new ones."""
    first = 0
    for shard in shards:
        yield range(first, first + shard["rows"])
        first += shard["rows"]
    while first < len(rows):
        last, size = first, 0
        while last < len(rows) and (last == first or size < SHARD_TOKENS):
            size += len(rows[last]["input_ids"])
            last += 1
        yield range(first, last)
        first = last


def _sound(folder: Path, shards: Sequence[dict], number: int, key: Key) -> bool:
    """Whether a shard is listed, there, and as long as its header and the manifest say."""
    if number >= len(shards):
        return False
    try:
        with safe_open(folder / shards[number]["file"], "pt") as file:
            lengths = {file.get_slice(name).get_shape()[0] for name in key.tensors}
    except (SafetensorError, OSError):
        return False
    return lengths == {sum(shards[number]["lengths"])}


def _stored(parts: list[Tensor]) -> Tensor:
    whole = torch.cat(parts)
    return (whole.int() if whole.dtype == torch.int64 else whole).cpu().contiguous()


def _length_batches(rows: Sequence[dict], indices: Sequence[int], budget: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in sorted(indices, key=lambda i: len(rows[i]["input_ids"])):
        if batch and (len(batch) + 1) * len(rows[index]["input_ids"]) > budget:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _read_manifest(folder: Path, key: Key) -> dict | None:
    path = folder / "manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text())
    found, asked = {"statistics": True, **manifest["key"]}, key.plain()
    if found["statistics"]:  # Statistics that nobody asks for are no fault.
        asked.pop("statistics", None)
    wrong = [name for name, value in asked.items() if found.get(name) != value]
    if wrong:
        raise DataError(
            f"{folder}: the stored features were made for another {', '.join(wrong)} "
            f"(found {_listed(found, wrong)}; expected {_listed(asked, wrong)}). "
            "Mend: remove the folder, or start a fresh run with --fresh"
        )
    return manifest


def _listed(key: dict, names: Sequence[str]) -> str:
    return ", ".join(str(key.get(name))[:40] for name in names)
