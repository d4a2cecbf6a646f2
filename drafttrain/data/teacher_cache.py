"""The teacher cut to its k likeliest words of each position, on the disk: the same store as data/store.py writes,
with ids and log-probabilities in place of hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.data.conversations import DataError
from drafttrain.data.features import NO_MASS, FeatureSource, logit_statistics, next_supervised, placed
from drafttrain.data.store import Key, StoredFeatures, write_store
from drafttrain.drafts.base import Batch
from drafttrain.target import Target, TargetHead


@dataclass(frozen=True)
class TopKKey(Key):
    """Likeliest words: another target, count or data makes them useless.

    Log-probabilities are kept in fp32. What the teacher leaves to all other words is 1 - sum p, a small difference:
    on Gemma 3 270M with k = 64 bfloat16 misses it by 1.9e-3 on average and makes it negative now and then, float16 by
    2.3e-4 (up to a quarter of it where the target is sure), fp32 by 3e-8.
    """

    target_fingerprint: str
    top_k: int
    rows_sha256: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("topk_ids", "topk_log_p", "target_lse", "target_argmax")

    def token_bytes(self, hidden_size: int) -> int:
        """8 bytes a word (int32 and fp32), and 8 of statistics; less than exact bfloat16 states for k < Ht / 4."""
        return 8 * self.top_k + 8


class OnlineTopK(FeatureSource):
    """Runs the target on each batch and fills topk_ids, topk_log_p, target_lse and target_argmax, nothing else.

    Positions whose next token is not supervised have ids 0 and log-probabilities NO_MASS. DataError when k exceeds
    the target's vocabulary.
    """

    def __init__(self, target: Target, k: int):
        if k > target.vocab_size:
            raise DataError(
                f"features.top_k is {k}, but {target.name} has {target.vocab_size} words. Expected at most as many. "
                "Mend: lower features.top_k"
            )
        self.target, self.k = target, k
        self._head = target.head()

    @torch.no_grad()
    def attach(self, batch: Batch) -> Batch:
        n = self.target.num_layers
        last = self.target.hidden_states(batch.input_ids, batch.lengths, [n])[n]
        needed = next_supervised(batch.loss_mask).to(last.device)
        ids, log_p, lse, argmax = likeliest(self._head, last[needed], self.k)
        return replace(
            batch,
            topk_ids=placed(needed, ids),
            topk_log_p=placed(needed, log_p, NO_MASS),
            target_lse=placed(needed, lse),
            target_argmax=placed(needed, argmax),
        )


def likeliest(head: TargetHead, last_hidden: Tensor, k: int, chunk: int = 256) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k likeliest tokens int64 [R, k], falling, their full-vocabulary log-probabilities fp32 [R, k], log-sum-exp
    fp32 [R] and argmax int64 [R] of un-normed last hidden states [R, Ht], a chunk at a time.
    """
    parts = []
    for part in last_hidden.split(chunk):
        logits = head(part)
        values, ids = logits.topk(k)
        lse, argmax = logit_statistics(logits)
        parts.append((ids, values.float() - lse[:, None], lse, argmax))
    ids, log_p, lse, argmax = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, log_p, lse, argmax


def write_topk(
    folder: Path,
    key: TopKKey,
    target: Target,
    rows: Sequence[dict],
    batch_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the key.top_k likeliest words of each supervised position of all rows; see `write_store` for shards,
    resuming and progress. DataError when the target has not so many.
    """
    write_store(folder, key, OnlineTopK(target, key.top_k), rows, batch_tokens, progress)


class TopKFeatures(StoredFeatures):
    """Reads what `write_topk` wrote: attach fills topk_ids, topk_log_p, target_lse and target_argmax, nothing else.

    Raises DataError when it is missing, unfinished, damaged, or belongs to another target, k or data.
    """
