"""The draft vocabulary: the target's most frequent produced tokens, counted on supervised training tokens alone.
Special and stop tokens are always in it: without them no turn's end can be drafted. See FR-Spec, arXiv 2502.14856."""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.data.conversations import DataError
from drafttrain.data.files import write_beside, write_json
from drafttrain.drafts.base import tokenizer_hash
from drafttrain.target import Target

Rows = Iterable[tuple[Sequence[int], Sequence[int]]]

MOST_ADDED = 1024  # More added special tokens than this are reserved slots, which no text holds.
BROUGHT = "the one that draft.init_from has"
"""In the place of a size: the vocabulary is a trained draft's own."""
TENSORS, FACTS = "draft_vocab.safetensors", "draft_vocab.json"


@dataclass(frozen=True)
class DraftVocab:
    """ids int64 [Vd]: target ids, strictly rising; coverage: share of the counted tokens that are in it; distinct: how
    many different tokens were counted."""

    ids: Tensor
    coverage: float
    distinct: int


def build_draft_vocab(rows: Rows, vocab_size: int, size: int | None, keep_ids: Collection[int]) -> DraftVocab:
    """The `size` target ids that a draft can say, from rows of (token ids, loss mask) of the TRAINING data.

    `keep_ids` first, then by count of supervised tokens, then, where fewer distinct ones were seen than asked for, by
    count of the other tokens (prompts hold what answers will say), then the lowest unused ids; ties: the lower id.
    size None or >= vocab_size: all ids. Raises DataError when size is below the number of kept ids, an id is not in
    0..vocab_size-1, or nothing is supervised.
    """
    counts, others = _count(rows, vocab_size)
    distinct = int((counts > 0).sum())
    if size is None or size >= vocab_size:
        return DraftVocab(torch.arange(vocab_size), 1.0, distinct)
    kept = len(set(keep_ids))
    if size < kept:
        raise DataError(
            f"data.draft_vocab is {size}, but {kept} special and stop tokens are always in it; expected more "
            "than that, 8000 to 32000 are usual"
        )
    ids = _ranked(counts, others, keep_ids)[:size].sort().values
    return DraftVocab(ids, int(counts[ids].sum()) / int(counts.sum()), distinct)


def ranked_ids(rows: Rows, vocab_size: int, keep_ids: Collection[int]) -> Tensor:
    """All ids int64 [V], those first that `build_draft_vocab` takes first."""
    return _ranked(*_count(rows, vocab_size), keep_ids)


def _ranked(counts: Tensor, others: Tensor, keep_ids: Collection[int]) -> Tensor:
    kept = torch.tensor(sorted(set(keep_ids)), dtype=torch.long)
    _check_ids(kept, len(counts), "the kept tokens")
    ranked = counts * (int(others.sum()) + 1) + others
    ranked[kept] = int(ranked.max()) + 1
    # A stable sort leaves equal counts in the order of their ids, unused ones included.
    return ranked.argsort(descending=True, stable=True)


def given_vocab(ids: Tensor, rows: Rows, vocab_size: int) -> DraftVocab:
    """The vocabulary that a draft brings with it, ids int64 [Vd], measured on rows as in `build_draft_vocab`."""
    counts, _ = _count(rows, vocab_size)
    return DraftVocab(ids, int(counts[ids].sum()) / int(counts.sum()), int((counts > 0).sum()))


def coverage(vocab: DraftVocab, rows: Rows) -> float:
    """Share of the supervised tokens of other rows that the vocabulary holds: the ceiling it sets on acceptance.

    Raises DataError when nothing is supervised in them.
    """
    supervised = [_supervised(ids, mask) for ids, mask in rows]
    tokens = torch.cat(supervised) if supervised else torch.zeros(0, dtype=torch.long)
    if not len(tokens):
        raise DataError("found no supervised token to measure the draft vocabulary on; check the data and its mask")
    return int(torch.isin(tokens, vocab.ids).sum()) / len(tokens)


def special_ids(target: Target) -> list[int]:
    """Ids that every draft vocabulary keeps, ascending: the tokenizer's special tokens, the target's stop tokens, and
    added tokens marked special unless there are 1024 or more of them. Ids beyond the target's vocabulary are not."""
    ids = set(target.stop_ids)
    if target.tokenizer is not None:
        added = [token for token, entry in target.tokenizer.added_tokens_decoder.items() if entry.special]
        ids |= set(target.tokenizer.all_special_ids) | set(added if len(added) < MOST_ADDED else ())
    return sorted(token for token in ids if token < target.vocab_size)


def save_vocab(vocab: DraftVocab, folder: Path, target: Target, size: int | str | None) -> None:
    """Write draft_vocab.safetensors and draft_vocab.json (what it was made for); size: as asked for in the recipe, or
    BROUGHT.
    """
    facts = {
        **_made_for(target, size),
        "coverage": vocab.coverage,
        "distinct": vocab.distinct,
        "ids_sha256": _hash(vocab.ids),
    }
    write_beside(folder / TENSORS, lambda path: save_file({"ids": vocab.ids.contiguous()}, path))
    write_json(folder / FACTS, facts)


def load_vocab(folder: Path, target: Target, size: int | str | None) -> DraftVocab:
    """What save_vocab wrote. DataError when it is missing or broken, or made for another tokenizer, vocabulary or size:
    a stale map would send every draft to the wrong token."""
    try:
        facts = dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
        ids = load_file(folder / TENSORS)["ids"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"{folder}: cannot read the draft vocabulary ({error}); prepare the data again") from error
    expected = {**_made_for(target, size), "ids_sha256": _hash(ids)}
    stale = [f"{key} {facts.get(key)}, now {value}" for key, value in expected.items() if facts.get(key) != value]
    if stale:
        raise DataError(f"{folder / FACTS} is stale ({'; '.join(stale)}); prepare the data again with --fresh")
    return DraftVocab(ids, facts["coverage"], facts["distinct"])


def _made_for(target: Target, size: int | str | None) -> dict[str, str | int | None]:
    return {
        "tokenizer_sha256": None if target.tokenizer is None else tokenizer_hash(target.tokenizer),
        "vocab_size": target.vocab_size,
        "draft_vocab": size,
    }


def _hash(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def _count(rows: Rows, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each id is supervised, and how often it is not: int64 [V] each."""
    counts, others = torch.zeros(2, vocab_size, dtype=torch.long)
    for ids, mask in rows:
        supervised, tokens = _supervised(ids, mask), torch.as_tensor(ids, dtype=torch.long)
        _check_ids(tokens, vocab_size, "the training data")
        counts += torch.bincount(supervised, minlength=vocab_size)
        others += torch.bincount(tokens, minlength=vocab_size)
    if not counts.any():
        raise DataError("found no supervised token to count for the draft vocabulary; check data.train and its mask")
    return counts, others - counts


def _supervised(ids: Sequence[int], mask: Sequence[int]) -> Tensor:
    tokens = torch.as_tensor(ids, dtype=torch.long)
    return tokens[torch.as_tensor(mask, dtype=torch.bool)]


def _check_ids(ids: Tensor, vocab_size: int, where: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        worst = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        raise DataError(
            f"{where}: found token id {worst}, expected 0 to {vocab_size - 1}; the rows were made with another "
            "tokenizer, prepare them again"
        )
