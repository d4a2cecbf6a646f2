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
from drafttrain.nn.teacher import LEAST_LOG
from drafttrain.target import Target, TargetHead

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_TOKENS = 50_000
NO_MASS = LEAST_LOG
"""The log-probability at positions without a teacher: e to it is 0, and unlike -inf it is finite times 0."""
PADDING = {"topk_log_p": NO_MASS}


class FeatureSource(ABC):
    """attach(batch) fills the target's part of a Batch: hidden states and statistics, or the likeliest words."""

    @abstractmethod
    def attach(self, batch: Batch) -> Batch:
        """A copy of the batch with the target's tensors; see drafts.base.Batch for shapes."""


class OnlineFeatures(FeatureSource):
    """Runs the target on each batch, under no_grad (not inference_mode: the draft's backward reads these tensors).

    layers may be empty: features stay None. statistics False spares the product with the whole vocabulary: target_lse
    and target_argmax stay None.
    """

    def __init__(
        self, target: Target, layers: Sequence[int], dtype: torch.dtype = torch.bfloat16, statistics: bool = True
    ):
        self.target, self.layers, self.dtype = target, list(layers), dtype
        self._head = target.head() if statistics else None

    @torch.no_grad()
    def attach(self, batch: Batch) -> Batch:
        n = self.target.num_layers
        states = self.target.hidden_states(batch.input_ids, batch.lengths, sorted({*self.layers, n}))
        last, lse, argmax = states[n], None, None
        if self._head is not None:
            needed = next_supervised(batch.loss_mask).to(last.device)
            lse, argmax = (placed(needed, values) for values in teacher_statistics(self._head, last[needed]))
        features = [states[k].to(last.device, self.dtype) for k in self.layers]
        return replace(
            batch,
            features=torch.cat(features, -1) if features else None,
            last_hidden=last.to(self.dtype),
            target_lse=lse,
            target_argmax=argmax,
        )


def next_supervised(loss_mask: Tensor) -> Tensor:
    """bool [B, T] from loss_mask [B, T]: the positions whose next token is supervised, i.e. where the target's
    distribution is asked for.
    """
    needed = loss_mask.roll(-1, 1).bool()
    needed[:, -1] = False
    return needed


def placed(needed: Tensor, values: Tensor, padding: float = 0) -> Tensor:
    """values [R, ..] put at the R true positions of needed bool [B, T]; `padding` elsewhere. [B, T, ..]."""
    out = values.new_full((*needed.shape, *values.shape[1:]), padding)
    out[needed] = values
    return out


def teacher_statistics(head: TargetHead, last_hidden: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Full-vocabulary log-sum-exp fp32 [R] and argmax int64 [R] of un-normed last hidden states [R, Ht], a chunk at a
    time.
    """
    parts = [logit_statistics(head(part)) for part in last_hidden.split(chunk)]
    lse, argmax = (torch.cat(column) for column in zip(*parts, strict=True))
    return lse, argmax


def logit_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp fp32 [R] and argmax int64 [R] of logits [R, V]; fp32 logits are overwritten."""
    largest, index = logits.max(-1)
    largest = largest.float()
    shifted = logits.float().sub_(largest[:, None]).exp_()
    return shifted.sum(-1).log() + largest, index


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

    Raises DataError when the store is missing, unfinished, damaged, or belongs to another target, data or settings.
    """

    def __init__(self, folder: Path, key: Key, rows: int):
        self.folder, self.key = folder, key
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
        for name in self.key.tensors:
            first = found[0][name]
            dtype = torch.int64 if first.dtype == torch.int32 else first.dtype
            out = torch.empty(len(found), T, *first.shape[1:], dtype=dtype)
            for i, row in enumerate(found):
                length = len(row[name])
                out[i, :length] = row[name]
                out[i, length:] = PADDING.get(name, 0)
            tensors[name] = out.to(batch.input_ids.device)
        return replace(batch, **tensors)

    def _row(self, index: int) -> dict[str, Tensor]:
        assert index >= 0, "a row that the draft went on with is not in the store"
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
        return {name: shard.get_slice(name)[start:end] for name in self.key.tensors}


def write_store(
    folder: Path,
    key: Key,
    source: FeatureSource,
    rows: Sequence[dict],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write what the source attaches to each row, the key's tensors, into shards of about 50,000 tokens, then the
    manifest; resumes behind the last whole shard.

    progress is told the tokens done so far. A token takes `bytes_per_token` bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = (_read_manifest(folder, key) or {"shards": []})["shards"]
    shards = list(takewhile(lambda shard: (folder / shard["file"]).exists(), shards))
    manifest = {"key": key.plain(), "shards": shards}
    done = sum(shard["rows"] for shard in shards)
    tokens = sum(sum(shard["lengths"]) for shard in shards)
    while done < len(rows):
        count, size = 0, 0
        while done + count < len(rows) and (count == 0 or size < SHARD_TOKENS):
            size += len(rows[done + count]["input_ids"])
            count += 1
        parts: dict[int, dict[str, Tensor]] = {}
        for batch_rows in _length_batches(rows, range(done, done + count), batch_tokens):
            batch = source.attach(Batch(**collate([rows[i] for i in batch_rows])))
            for b, row in enumerate(batch_rows):
                parts[row] = {name: getattr(batch, name)[b, : batch.lengths[b]] for name in key.tensors}
            tokens += int(batch.lengths.sum())
            if progress is not None:
                progress(tokens)
        file = f"shard-{len(shards):05d}.safetensors"
        tensors = {name: _stored([parts[row][name] for row in sorted(parts)]) for name in key.tensors}
        write_beside(folder / file, lambda path, tensors=tensors: save_file(tensors, path))
        lengths = [len(rows[i]["input_ids"]) for i in range(done, done + count)]
        shards.append({"file": file, "rows": count, "lengths": lengths})
        write_json(folder / "manifest.json", manifest)
        done += count


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


@torch.no_grad()
def channel_statistics(source: FeatureSource, target: Target, rows: Sequence[dict], max_tokens: int = 20_000) -> dict:
    """feature_rms fp32 [A*Ht] and final_rms fp32 [Ht]: rms of each channel of the features and of norm(hs[n]), of a
    source with feature layers.

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
