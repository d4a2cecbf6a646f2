"""Where the features of a run come from, as its recipe says: the target, a store (which it or a vLLM fills), both, or
the target's likeliest words.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from drafttrain.data.batching import row_name
from drafttrain.data.conversations import DataError
from drafttrain.data.features import DTYPES, FeatureSource, OnlineFeatures
from drafttrain.data.progress import progress_bar
from drafttrain.data.store import (
    GIB,
    MOST_GIB,
    HybridFeatures,
    Key,
    StoredFeatures,
    StoreKey,
    bytes_per_token,
    check_room,
    rows_listed,
    rows_missing,
    rows_within,
    write_store,
)
from drafttrain.data.teacher_cache import TopKFeatures, TopKKey, write_topk
from drafttrain.data.vllm_features import clear_files, open_vllm, spool_bytes
from drafttrain.recipe import Recipe
from drafttrain.target import Target


def online_source(recipe: Recipe, target: Target, layers: list[int]) -> OnlineFeatures:
    """The target itself, run on each batch: the hs[k] of `layers`, and statistics where the draft needs them."""
    return OnlineFeatures(target, layers, DTYPES[recipe.features.dtype], needs_statistics(recipe))


def needs_statistics(recipe: Recipe) -> bool:
    """Whether the full vocabulary's log-sum-exp and argmax are taken with the features: a draft of every word finds
    them in its own loss.
    """
    return recipe.method == "eagle3" or recipe.data.draft_vocab is not None


def rows_digest(rows: Sequence[dict]) -> str:
    """sha256 of the ids and masks of all rows: what a store belongs to."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row["input_ids"], row["loss_mask"])).encode())
    return digest.hexdigest()


def store_key(recipe: Recipe, target: Target, layers: list[int], split: str, digest: str) -> Key | None:
    """What the stored features of a split belong to; None where none are stored. Of likeliest words, validation stores
    none and asks the target itself: acceptance measured on those words would be too high.
    """
    features = recipe.features
    if features.source == "topk" and split == "train":
        return TopKKey(target.fingerprint, features.top_k, digest)
    if features.source in ("store", "hybrid", "vllm"):
        return StoreKey(target.fingerprint, tuple(layers), features.dtype, digest, needs_statistics(recipe))
    return None


def open_source(recipe: Recipe, target: Target, layers: list[int], key: Key | None, folder: Path, rows: int):
    """The FeatureSource of a split of so many rows, stored in `folder`. DataError where the store does not fit."""
    if key is None:
        return online_source(recipe, target, layers)
    if isinstance(key, TopKKey):
        return TopKFeatures(folder, key, rows)
    if recipe.features.source == "hybrid":
        return HybridFeatures(folder, key, online_source(recipe, target, layers))
    return StoredFeatures(folder, key, rows)


def write_features(
    recipe: Recipe,
    target: Target,
    layers: list[int],
    key: Key,
    folder: Path,
    rows: Sequence[dict],
    say: Callable[[str], None],
    room: float | None = None,
    confirmed: bool = False,
) -> float | None:
    """Write what is missing of a store, after saying how much it takes, and return what is left of `room`.

    room: GiB that the stored rows may take (source hybrid); None: all rows are stored. DataError where the disk has no
    room, or it takes much of the disk and is not confirmed.
    """
    width = bytes_per_token(key, target.hidden_size)
    whole = len(rows)
    if room is not None:
        rows = rows[: max(rows_within(rows, width, room), rows_listed(folder, key))]
    tokens = sum(len(row["input_ids"]) for row in rows)
    of = f" ({len(rows)} of {whole} samples; the target is asked for the others)" if room is not None else ""
    say(f"features: {tokens} tokens x {width} bytes = {tokens * width / GIB:.2f} GiB in {folder}{of}")
    most = MOST_GIB if room is None else math.inf  # Of max_gib the recipe's author has thought.
    missing = rows_missing(folder, key, rows)
    lengths = [len(rows[index]["input_ids"]) for index in missing]
    served = recipe.features.source == "vllm"
    if served:
        clear_files(recipe, folder)
    beside = spool_bytes(recipe, target, layers, lengths) if served else 0
    if beside and missing:
        say(f"  and up to {beside / GIB:.2f} GiB on the way, in files that vLLM writes")
    check_room(folder, sum(lengths) * width + beside, confirmed, most)
    with progress_bar(f"features ({folder.name})", tokens) as update:
        if isinstance(key, TopKKey):
            write_topk(folder, key, target, rows, recipe.features.batch_tokens, update)
        elif served and missing:
            with open_vllm(recipe, target, layers, rows, missing, folder, key.statistics, say) as source:
                write_store(folder, key, source, rows, recipe.features.batch_tokens, update)
        else:
            online = online_source(recipe, target, layers)
            write_store(folder, key, online, rows, recipe.features.batch_tokens, update)
    return None if room is None else room - tokens * width / GIB


def finite_samples(
    source: FeatureSource, rows: list[dict], dtype: str, split: str, say: Callable[[str], None]
) -> list[dict]:
    """The rows without those whose stored features are not finite, which are named. DataError where they are most."""
    broken = [row for row in rows if row["index"] in source.skipped]
    if not broken:
        return rows
    if len(broken) > len(rows) / 2:
        raise DataError(
            f"features ({split}): not finite in {len(broken)} of {len(rows)} samples, {row_name(broken[0])} among them "
            f"(features.dtype {dtype}). Expected numbers. Mend: features.dtype bfloat16 (float16 ends at 65504), or "
            "check the target's weights; then a fresh run"
        )
    shown = ", ".join(map(row_name, broken[:5])) + (" .." if len(broken) > 5 else "")
    say(f"features ({split}): skipped {len(broken)} of {len(rows)} samples, which are not finite: {shown}")
    return [row for row in rows if row["index"] not in source.skipped]
