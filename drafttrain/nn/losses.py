"""The distillation losses written plainly over whole matrices: the twins that `fused_losses` is tested against.

p is the teacher on the draft vocabulary, p = exp(z - lse) with lse over the FULL vocabulary: a sub-distribution of
mass <= 1. q is the draft's softmax over its own vocabulary. One row is one (position, unroll step).
"""

import torch
from torch import Tensor

LEAST_ALPHA = 1e-30
"""-log alpha is cut off here: 69 nats, where a draft and a teacher have no word in common."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def teacher_probabilities(teacher_logits: Tensor, target_lse: Tensor) -> Tensor:
    """p fp32 [R, Vd] from the teacher's logits on draft-vocabulary rows [R, Vd] and its full log-sum-exp [R]."""
    return (_wide(teacher_logits) - _wide(target_lse)[:, None]).exp()


def forward_kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) per row [R] = sum_i p_i (log p_i - log q_i); terms with p_i = 0 count zero. Not clamped: mass < 1
    may go below 0.
    """
    return (p * (p.clamp_min(1e-30).log() - _wide(logits).log_softmax(-1))).sum(-1)


def reverse_kl(log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(q || p) per row [R] = sum_i q_i (log q_i - log p_i). log_p [R, Vd], as the log of an underflowed p would be
    infinite.
    """
    log_q = _wide(logits).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jsd(p: Tensor, logits: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence per row [R]: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 -
    beta) q (arXiv 2306.13649, section 3). Divided by beta it tends to KL(p || q) for beta -> 0, by 1 - beta to
    KL(q || p) for beta -> 1.
    """
    q = _wide(logits).softmax(-1)
    m = beta * p + (1 - beta) * q
    log_m = m.clamp_min(1e-30).log()
    from_p = (p * (p.clamp_min(1e-30).log() - log_m)).sum(-1)
    from_q = (q * (q.clamp_min(1e-30).log() - log_m)).sum(-1)
    return beta * from_p + (1 - beta) * from_q


def total_variation(p: Tensor, logits: Tensor) -> Tensor:
    """1 - sum_i min(p_i, q_i) per row [R]: the chance that a draft drawn from q is refused (see
    `acceptance`).
    """
    return 1 - acceptance(p, logits)


def neg_log_alpha(p: Tensor, logits: Tensor) -> Tensor:
    """-log of the acceptance per row [R] (arXiv 2602.23881), cut off at `LEAST_ALPHA`; cross-entropy for a one-hot
    p.
    """
    return -acceptance(p, logits).clamp_min(LEAST_ALPHA).log()


def lk_hybrid(p: Tensor, logits: Tensor, eta: float = 3.0) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q) per row [R], w = exp(-eta alpha) of that row, detached (arXiv 2602.23881): KL
    far from the teacher, TV near it.
    """
    w = (-eta * acceptance(p, logits).detach()).exp()
    return w * forward_kl(p, logits) + (1 - w) * total_variation(p, logits)


def cross_entropy(p: Tensor, logits: Tensor, target_index: Tensor) -> Tensor:
    """-log q at the target's argmax [R]; rows whose argmax lies outside the draft vocabulary (index -1) count zero."""
    return next_token(logits, target_index)


def next_token(logits: Tensor, token_index: Tensor) -> Tensor:
    """-log q at the data's own next token [R]: plain language modelling; -1 (outside the draft vocabulary) counts
    zero.
    """
    log_q = _wide(logits).log_softmax(-1).gather(-1, token_index.clamp_min(0)[:, None])[:, 0]
    return -log_q * (token_index >= 0)


def acceptance(p: Tensor, logits: Tensor) -> Tensor:
    """alpha = sum_i min(p_i, q_i) [R]: the chance that a draft drawn from q is accepted (arXiv 2211.17192, theorem
    3.5).
    """
    return p.minimum(_wide(logits).softmax(-1)).sum(-1)


def hits(logits: Tensor, target_index: Tensor) -> Tensor:
    """Whether the draft's argmax is the target's, bool [R]. A target argmax outside the draft vocabulary (-1) is a
    miss.
    """
    return logits.argmax(-1) == target_index
