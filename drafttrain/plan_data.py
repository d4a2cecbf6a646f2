"""How much data a recipe trains on: counted where the files are here and small, assumed, and said so, otherwise."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.data.batching import TokenBudgetSampler
from drafttrain.data.chat import encode
from drafttrain.data.chat_template import Chat
from drafttrain.data.conversations import load_conversations
from drafttrain.recipe import DataEntry, Recipe
from drafttrain.target_files import TOKENIZER_FILES, TargetError, find_folder, read_tokenizer

SMALL = 64 * 2**20
"""Bytes of local files that are read and tokenised."""
BYTES_A_TOKEN = 4.0
"""Of larger files: an assumption, about right for English text with its JSON around it."""
ASSUMED_ROWS, ASSUMED_LENGTH, ASSUMED_SHARE = 100_000, 1_000, 0.6
"""Of data that is not here: rows, tokens of a row (at most data.max_length), and their supervised share."""
KNOWN_ROWS = {("HuggingFaceH4/ultrachat_200k", "train_sft"): 207_865}
"""Rows of a dataset's split, as its page on the hub says."""


@dataclass(frozen=True)
class Volume:
    """Tokens of the training split. length: mean tokens of a row; longest: of a row; supervised: tokens that the target
    produces; batch: padded tokens of the largest batch, None where rows are not known. how: in words.
    """

    rows: int
    tokens: int
    supervised: int
    longest: int
    assumed: bool
    how: str
    batch: int | None = None

    @property
    def length(self) -> float:
        return self.tokens / max(self.rows, 1)

    @property
    def share(self) -> float:
        """Supervised ones of the tokens."""
        return self.supervised / max(self.tokens, 1)

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "mean_length": self.length}


def volume(recipe: Recipe, tokens: int | None = None) -> Volume:
    """The training split's volume. tokens: given by the user, in place of counting. DataError for files that cannot be
    read.
    """
    longest = recipe.data.max_length
    length = min(longest, ASSUMED_LENGTH)
    if tokens is not None:
        supervised = round(tokens * ASSUMED_SHARE)
        rows = max(1, tokens // length)
        how = f"given; assumed: rows of {length} tokens, {ASSUMED_SHARE:.0%} of them supervised"
        return Volume(rows, tokens, supervised, longest, True, how)
    entries = recipe.data.train
    sizes = [_bytes(entry) for entry in entries]
    if all(size is not None for size in sizes) and sum(sizes) <= SMALL:
        tokenizer = _tokenizer(recipe)
        if tokenizer is not None:
            return counted(recipe, tokenizer)
    rows, parts = 0.0, []
    for entry, size in zip(entries, sizes, strict=True):
        found, words = _assumed_rows(entry, size, length)
        rows += found * entry.weight
        parts.append(words)
    total = max(1, round(rows * length))
    how = f"{'; '.join(parts)}; rows of {length} tokens, {ASSUMED_SHARE:.0%} of them supervised (--tokens N says it)"
    return Volume(max(1, round(rows)), total, round(total * ASSUMED_SHARE), longest, True, how)


def counted(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Volume:
    """Read and tokenised, as `drafttrain prepare` would, answers as they are in the data."""
    stops = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    options = {"chat": Chat.of(recipe), "max_length": recipe.data.max_length, "stop_ids": stops}
    rows = [encode(one, tokenizer, **options) for one in load_conversations(recipe.data.train, recipe.data.seed)]
    kept = [row for row in rows if row.dropped is None]
    lengths = [len(row.input_ids) for row in kept] or [1]
    budget = max(recipe.training.max_tokens_per_batch, max(lengths))
    batches = TokenBudgetSampler(lengths, budget, 1, recipe.training.seed).batches()
    batch = max(len(rows) * max(lengths[i] for i in rows) for rows in batches)
    supervised = sum(sum(row.loss_mask) for row in kept)
    how = f"counted in the recipe's files ({len(rows) - len(kept)} rows dropped)"
    if recipe.data.regenerate is not None:
        how += "; answers will be regenerated: lengths are those in the files"
    return Volume(len(kept), sum(lengths), supervised, max(lengths), False, how, batch)


def _bytes(entry: DataEntry) -> int | None:
    """Of a local entry's files; None where they are not here."""
    if entry.path is None:
        return None
    path = Path(entry.path)
    if not path.exists():
        return None
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The target's, where it is here or can be had. Without files transformers makes an empty one, which is none."""
    target = recipe.target
    where = (target.name_or_path, target.gguf_file, target.revision, target.trust_remote_code)
    folder = find_folder(*where, weights=False)
    if not any((folder / name).exists() for name in TOKENIZER_FILES if name != "generation_config.json"):
        return None
    try:
        return read_tokenizer(str(folder), target.trust_remote_code)
    except TargetError:
        return None


def _assumed_rows(entry: DataEntry, size: int | None, length: int) -> tuple[float, str]:
    """(rows, in words) of an entry whose rows are not counted."""
    name = entry.path or entry.dataset
    if size is not None:
        return size / BYTES_A_TOKEN / length, f"{Path(name).name}: assumed {BYTES_A_TOKEN:g} bytes a token"
    found = re.search(r"\[(\d*):(\d+)\]", entry.split)
    cut = None if found is None else int(found[2]) - int(found[1] or 0)
    known = KNOWN_ROWS.get((entry.dataset or "", entry.split.partition("[")[0]))
    if cut is not None:
        return min(cut, known or cut), f"{name}: {cut:,} rows by its split"
    if known is not None:
        return known, f"{name}: {known:,} rows by its page"
    return ASSUMED_ROWS, f"{name}: not here, assumed {ASSUMED_ROWS:,} rows"
