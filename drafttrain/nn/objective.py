"""The objective of a distillation: named losses with weights, and each loss with its gradient for a block of rows.

The formulas are those of `losses`, whose functions are the plain twins. A gradient is with respect to the draft's
logits; g_i = dL/dq_i gives dL/dz_i = q_i (g_i - sum_j q_j g_j).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self, get_args

from torch import Tensor

from drafttrain.nn.losses import LEAST_ALPHA
from drafttrain.nn.teacher import TINY, DraftWords, Words, dot
from drafttrain.recipe import LossName, TrainingConfig

LABELS = ("cross_entropy", "next_token")


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses over the rows.

    weights: loss name -> weight > 0. jsd_beta in (0, 1); lk_eta >= 0. temperature T softens teacher and draft alike and
    multiplies the loss by T^2, so that gradients keep their size (arXiv 1503.02531, section 2); the losses on labels
    (cross_entropy, next_token) stay at T = 1, as there. T != 1 needs a dense teacher over the full vocabulary.
    """

    weights: dict[str, float]
    jsd_beta: float = 0.5
    lk_eta: float = 3.0
    temperature: float = 1.0

    def __post_init__(self):
        assert self.weights and self.weights.keys() <= set(get_args(LossName)), self.weights
        assert all(weight > 0 for weight in self.weights.values()) and self.temperature > 0
        assert 0 < self.jsd_beta < 1 and self.lk_eta >= 0

    @classmethod
    def of(
        cls, loss: str | Mapping[str, float], jsd_beta: float = 0.5, lk_eta: float = 3.0, temperature: float = 1.0
    ) -> Self:
        """One loss by name, or several with weights."""
        return cls({loss: 1.0} if isinstance(loss, str) else dict(loss), jsd_beta, lk_eta, temperature)

    @classmethod
    def from_config(cls, config: TrainingConfig) -> Self:
        """What a recipe's training section asks for."""
        return cls.of(config.loss, config.jsd_beta, config.lk_eta, config.temperature)


@dataclass
class Pair:
    """Teacher and draft of the same n rows, at the same temperature."""

    teacher: Words
    draft: DraftWords

    @cached_property
    def overlap(self) -> Tensor:
        """alpha = sum min(p, q) [n]."""
        return self.teacher.p.minimum(self.draft.q).sum(-1)


Gradient = Callable[[], Tensor]
"""Called once, where a gradient is wanted: d loss / d logits [n, Vd], a matrix of its own."""


def combined(
    objective: Objective, plain: Pair, soft: Pair, target: Tensor, token: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The objective of each row [n], and its gradient with respect to the logits [n, Vd] at T = 1 or None.

    plain: the rows at T = 1; soft: at the objective's temperature. target, token int64 [n]: draft indices of the
    target's argmax and of the data's next token, -1 outside the draft vocabulary.
    """
    total, gradient = None, None
    for name, weight in objective.weights.items():
        value, slope, factor = weight, weight, objective.temperature
        if name in LABELS:
            index = target if name == "cross_entropy" else token
            loss, make = label(plain.draft, index)
        else:
            loss, make = soft_loss(name, objective, soft)
            value, slope = weight * factor**2, weight * factor
        loss = loss if value == 1 else loss * value
        total = loss if total is None else total + loss
        if with_gradient:
            part = make() if slope == 1 else make().mul_(slope)
            gradient = part if gradient is None else gradient.add_(part)
    return total, gradient


def soft_loss(name: str, objective: Objective, pair: Pair) -> tuple[Tensor, Gradient]:
    """Any loss that compares two distributions: each row's value [n], and its gradient on demand."""
    match name:
        case "forward_kl":
            return forward_kl(pair)
        case "reverse_kl":
            return reverse_kl(pair)
        case "jsd":
            return jsd(pair, objective.jsd_beta)
        case "total_variation":
            return 1 - pair.overlap, lambda: _overlap_gradient(pair).neg_()
        case "neg_log_alpha":
            alpha = pair.overlap.clamp_min(LEAST_ALPHA)
            return -alpha.log(), lambda: _overlap_gradient(pair).mul_(-1 / alpha[:, None])
        case "lk_hybrid":
            return lk_hybrid(pair, objective.lk_eta)
    raise AssertionError(name)


def forward_kl(pair: Pair) -> tuple[Tensor, Gradient]:
    """sum p log(p / q); gradient mass q - p."""
    teacher, draft = pair.teacher, pair.draft
    value = teacher.negative_entropy - dot(teacher.p, draft.z) + teacher.mass * draft.lse
    return value, lambda: draft.q.mul(teacher.mass[:, None]).sub_(teacher.p)


def reverse_kl(pair: Pair) -> tuple[Tensor, Gradient]:
    """sum q log(q / p); g = log(q / p)."""
    excess = (pair.draft.log_q - pair.teacher.log_p).mul_(pair.draft.q)
    value = excess.sum(-1)
    return value, lambda: excess.addcmul_(pair.draft.q, value[:, None], value=-1)


def jsd(pair: Pair, beta: float) -> tuple[Tensor, Gradient]:
    """beta KL(p || m) + (1 - beta) KL(q || m); g = (1 - beta) log(q / m)."""
    teacher, draft = pair.teacher, pair.draft
    log_m = (beta * teacher.p).add_(draft.q, alpha=1 - beta).clamp_(min=TINY).log_()
    from_p = teacher.negative_entropy - dot(teacher.p, log_m)
    excess = (draft.log_q - log_m).mul_(draft.q)
    from_q = excess.sum(-1)
    value = beta * from_p + (1 - beta) * from_q
    return value, lambda: excess.addcmul_(draft.q, from_q[:, None], value=-1).mul_(1 - beta)


def lk_hybrid(pair: Pair, eta: float) -> tuple[Tensor, Gradient]:
    """w KL(p || q) + (1 - w) TV(p, q), w = exp(-eta alpha) held fixed."""
    w = (-eta * pair.overlap).exp()
    kl, make = forward_kl(pair)
    value = w * kl + (1 - w) * (1 - pair.overlap)
    return value, lambda: make().mul_(w[:, None]).addcmul_(_overlap_gradient(pair), 1 - w[:, None], value=-1)


def label(draft: DraftWords, index: Tensor) -> tuple[Tensor, Gradient]:
    """-log q of one word a row; gradient q - onehot. Rows with index -1 count zero."""
    known = (index >= 0).to(draft.q.dtype)
    at = index.clamp_min(0)

    def gradient() -> Tensor:
        return (draft.q * known[:, None]).scatter_add_(-1, at[:, None], -known[:, None])

    return -draft.log_q_at(at) * known, gradient


def _overlap_gradient(pair: Pair) -> Tensor:
    """Of alpha: g = [q < p], so q ([q < p] - sum of q where q < p)."""
    below = (pair.draft.q < pair.teacher.p) * pair.draft.q
    return below.addcmul_(pair.draft.q, below.sum(-1, keepdim=True), value=-1)
