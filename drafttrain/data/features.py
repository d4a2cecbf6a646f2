"""What a draft learns from: the target's features, last hidden states and full-vocabulary statistics.

A FeatureSource owns the frozen target (or its stored output: data/store.py) and attaches to each batch what the draft's
forward needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.data.batching import collate
from drafttrain.data.conversations import DataError
from drafttrain.drafts.base import Batch
from drafttrain.nn.teacher import LEAST_LOG
from drafttrain.target import Target, TargetHead

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NO_MASS = LEAST_LOG
"""The log-probability at positions without a teacher: e to it is 0, and unlike -inf it is finite times 0."""
PADDING = {"topk_log_p": NO_MASS}
ATTACHED = ("features", "last_hidden", "target_lse", "target_argmax", "topk_ids", "topk_log_p")
"""The fields of a Batch that a source fills."""


class FeatureSource(ABC):
    """attach(batch) fills the target's part of a Batch: hidden states and statistics, or the likeliest words."""

    reads_ahead = False
    """Whether `read` does anything."""
    skipped: Collection[int] = ()
    """Indices of rows that the source knows to be unusable: their features are not finite."""
    expected: Sequence[int] = ()
    """Indices of the rows that will be asked for, in that order, where whoever asks knows them."""

    @abstractmethod
    def attach(self, batch: Batch) -> Batch:
        """A copy of the batch with the target's tensors; see drafts.base.Batch for shapes. A batch that `read` has
        seen is only completed.
        """

    def read(self, batch: Batch) -> Batch:
        """What `attach` can do without the target, on any thread: a copy of the batch with what is stored."""
        return batch


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
        return with_states(batch, [states[k] for k in self.layers], states[n], self.dtype, self._head)


@torch.no_grad()
def with_states(
    batch: Batch, features: Sequence[Tensor], last: Tensor, dtype: torch.dtype, head: TargetHead | None
) -> Batch:
    """The batch with the target's hidden states in `dtype`: features hs[k] [B, T, Ht] each, side by side, and `last`
    hs[n]. With a head also its statistics, of `last` as it is given, where they are asked for.
    """
    lse = argmax = None
    if head is not None:
        needed = next_supervised(batch.loss_mask).to(last.device)
        lse, argmax = (placed(needed, values) for values in teacher_statistics(head, last[needed]))
    aside = [states.to(last.device, dtype) for states in features]
    return replace(
        batch,
        features=torch.cat(aside, -1) if aside else None,
        last_hidden=last.to(dtype),
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


def finite_rows(batch: Batch) -> Tensor:
    """bool [B]: the rows of which everything attached is finite."""
    finite = torch.ones(len(batch.input_ids), dtype=torch.bool, device=batch.input_ids.device)
    for name in ATTACHED:
        values = getattr(batch, name)
        if values is not None and values.is_floating_point():
            # The extremes carry a NaN; isfinite of it all would be a tensor as large again.
            for extreme in torch.aminmax(values.flatten(1), dim=1):
                finite &= extreme.isfinite().to(finite.device)
    return finite


def muted(batch: Batch, finite: Tensor) -> Batch:
    """A copy of the batch in which the rows that are not finite (bool [B]) are silent: nothing of them is supervised,
    labels -100, and their tokens and what the target said about them are replaced with padding.
    """

    def without(values: Tensor, padding: float) -> Tensor:
        kept = finite.to(values.device).view(-1, *[1] * (values.ndim - 1))
        return values.where(kept, torch.as_tensor(padding, dtype=values.dtype, device=values.device))

    found = {name: getattr(batch, name) for name in ATTACHED}
    tensors = {name: without(values, PADDING.get(name, 0)) for name, values in found.items() if values is not None}
    tensors["input_ids"] = without(batch.input_ids, 0)  # The draft may embed them as the target does.
    return replace(batch, loss_mask=without(batch.loss_mask, 0), labels=without(batch.labels, -100), **tensors)


@torch.no_grad()
def channel_statistics(source: FeatureSource, target: Target, rows: Sequence[dict], max_tokens: int = 20_000) -> dict:
    """feature_rms fp32 [A*Ht] and final_rms fp32 [Ht]: rms of each channel of the features and of norm(hs[n]), of a
    source with feature layers.

    Over rows spread evenly through the data, position 0 of each row left out: a BOS is an attention sink whose
    features are far off scale. Some channels of real targets are thousands of times the median, hence a static scale
    for each. Rows whose features are not finite are left out. DataError where no row is left.
    """
    total = sum(len(row["input_ids"]) for row in rows)
    stride = max(1, total // max_tokens)
    head = target.head()
    squares = final_squares = count = broken = 0
    for row in rows[::stride]:
        batch = source.attach(Batch(**collate([row])))
        if not finite_rows(batch).all():
            broken += 1
            continue
        squares = squares + batch.features[0, 1:].double().square().sum(0)
        final_squares = final_squares + head.normed(batch.last_hidden[0, 1:]).double().square().sum(0)
        count += batch.input_ids.shape[1] - 1
    if broken and not count:
        raise DataError(
            f"the target's features are not finite in any of {broken} samples. Expected numbers. Mend: features.dtype "
            "bfloat16 (float16 ends at 65504), or check the target's weights"
        )
    if not count:
        raise DataError("every row has a single token: nothing to measure the features on; check data.train")
    return {
        "feature_rms": (squares / count).sqrt().float().clamp_min(1e-6).cpu(),
        "final_rms": (final_squares / count).sqrt().float().clamp_min(1e-6).cpu(),
    }
