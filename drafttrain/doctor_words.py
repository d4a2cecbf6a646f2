"""What a draft says on known texts, as training computes it, and how often the target would accept it.

Row p, step k: the draft's word for x[p+2+k], given the text's own tokens; a hit where it is the target's choice there.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.data.batching import collate
from drafttrain.data.features import next_supervised, placed, teacher_statistics
from drafttrain.drafts.base import Draft, supervised_rows
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.medusa import MedusaDraft
from drafttrain.target import Target
from drafttrain.target_head import TargetHead

CHUNK = 256
Z = 3.0
"""Standard errors that a difference must have: chance alone gives as much in one comparison of 700."""


@dataclass
class Texts:
    """Right-padded texts: input_ids int64 [B, T], loss_mask bool [B, T], lengths int64 [B], states {k: hs[k] [B, T,
    Ht]} (hs[n] among them, un-normed), choice int64 [B, T]: the target's first choice behind each position.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    states: dict[int, Tensor]
    choice: Tensor

    @property
    def last(self) -> Tensor:
        return self.states[max(self.states)]

    def features(self, layers: Sequence[int]) -> Tensor:
        """hs[k] of the layers side by side, [B, T, A*Ht]."""
        return torch.cat([self.states[k].to(self.last.device) for k in layers], -1)

    def valid(self, steps: int) -> Tensor:
        """Rows that count at each step, bool [steps, B, T]."""
        return supervised_rows(self.loss_mask, steps)


def measured_layers(draft: Draft, target: Target) -> list[int]:
    """The layers that a draft reads and their neighbours."""
    near = {k + shift for k in draft.feature_layers for shift in (-1, 0, 1)}
    return sorted(k for k in near if 0 <= k <= target.num_layers)


@torch.no_grad()
def texts_of(target: Target, rows: Sequence[dict], layers: Sequence[int]) -> Texts:
    """Texts from rows {"input_ids", "loss_mask"}, read by the target, hs[k] of the layers and hs[n] kept."""
    batch = collate([{"index": 0, **row} for row in rows])
    n = target.num_layers
    ids, mask = batch["input_ids"].to(target.device), batch["loss_mask"].to(target.device)
    states = target.hidden_states(ids, batch["lengths"], sorted({*layers, n}))
    needed = next_supervised(mask).to(states[n].device)
    _, chosen = teacher_statistics(target.head(), states[n][needed])
    return Texts(ids, mask, batch["lengths"], dict(states), placed(needed, chosen, -1))


@torch.no_grad()
def step_states(
    draft: Draft, texts: Texts, steps: int, layers: Sequence[int] | None = None, features: Tensor | None = None
) -> list[Tensor]:
    """What the draft's head reads at each step, [B, T, H] each; layers: other hs[k] in the places of the draft's own,
    features: these tensors instead.
    """
    ids = texts.input_ids
    if isinstance(draft, Eagle3Draft):
        features = texts.features(layers or draft.feature_layers) if features is None else features
        return draft.unroll(ids, features, steps)
    if isinstance(draft, MedusaDraft):
        normed, between = draft.teacher.normed(texts.last), None
        if draft.embed_weight is not None:
            embedded = draft.embed(ids)
            ahead = [F.pad(embedded, (0, 0, 0, 1 + j))[:, 1 + j :] for j in range(steps)]
            between = torch.stack(ahead, -2)
        parts = [None if between is None else between[..., : i + 1, :] for i in range(steps)]
        return [draft.state(i, normed, part) for i, part in enumerate(parts)]
    assert isinstance(draft, KdDraft), draft.method
    small = draft.small_target()
    states = small.hidden_states(ids, texts.lengths, [small.num_layers])[small.num_layers]
    return [F.pad(states[:, 1 + k :], (0, 0, 0, 1 + k)) for k in range(steps)]


@torch.no_grad()
def logits_of(draft: Draft, step: int, states: Tensor) -> Tensor:
    """Logits [R, Vd] over the draft's vocabulary, from what `step_states` gave for the step, [R, H]."""
    if isinstance(draft, Eagle3Draft):
        return draft.lm_head(states)
    if isinstance(draft, MedusaDraft):
        return draft.logits(step, states)
    small = draft.small_target()
    return (small.head() if draft.whole_vocabulary else small.head(draft.draft_ids))(states)


def hits_of(draft: Draft, texts: Texts, steps: int, **changes) -> Tensor:
    """Whether each row's word at each step is the target's choice there: bool [steps, B, T], False where no row counts.
    changes: as in `step_states`.
    """
    valid = texts.valid(steps)
    out = torch.zeros_like(valid)
    for k, states in enumerate(step_states(draft, texts, steps, **changes)):
        rows = valid[k].to(states.device)
        words = [logits_of(draft, k, part).argmax(-1) for part in states[rows].split(CHUNK)]
        choice = F.pad(texts.choice[:, 1 + k :], (0, 1 + k), value=-1)
        if words:
            found = draft.draft_ids.to(rows.device)[torch.cat(words).to(rows.device)]
            out[k][rows] = found == choice.to(rows.device)[rows]
    return out


def share(hits: Tensor, valid: Tensor) -> float:
    """Share of the valid rows that hit; 0 where there are none."""
    return float((hits & valid).sum()) / max(1, int(valid.sum()))


def clearly_better(hits: Tensor, other: Tensor, least: float = 0.02) -> bool:
    """Whether `hits` are more than `other` on the same rows by McNemar's test, |a - b| / sqrt(a + b) over the rows on
    which they differ, above Z, and by at least so large a share of the rows that hit in either.
    """
    more, fewer = int((hits & ~other).sum()), int((other & ~hits).sum())
    gain = more - fewer
    return gain > Z * math.sqrt(more + fewer) and gain > least * max(1, int((hits | other).sum()))


def differ(hits: int, rows: int, others: int, other_rows: int) -> bool:
    """Whether two shares of different rows differ by more than Z standard errors (pooled, two-sided)."""
    if not rows or not other_rows:
        return False
    pooled = (hits + others) / (rows + other_rows)
    error = math.sqrt(pooled * (1 - pooled) * (1 / rows + 1 / other_rows))
    return abs(hits / rows - others / other_rows) > Z * error


def with_norm(draft: MedusaDraft, norm: nn.Module) -> MedusaDraft:
    """The same heads behind another norm; their weights are shared."""
    other, teacher = copy.copy(draft), draft.teacher
    other.teacher = TargetHead(norm, teacher.weight, teacher.bias, teacher.softcap, teacher.scale, teacher.input_normed)
    return other


def said(row: Mapping[str, Sequence[int]]) -> list[int]:
    """The supervised tokens of a row."""
    return [token for token, one in zip(row["input_ids"], row["loss_mask"], strict=True) if one]


def percent(value: float) -> str:
    return f"{value:.1%}"
