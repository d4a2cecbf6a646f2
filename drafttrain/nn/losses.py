"""The distillation losses written plainly over whole matrices: the twins that `fused_losses` is tested against.

p is the teacher on the draft vocabulary, p = exp(z - lse) with lse over the FULL vocabulary: a sub-distribution of
mass <= 1. q is the draft's softmax over its own vocabulary. One row is one (position, unroll step).
"""

from torch import Tensor


def teacher_probabilities(teacher_logits: Tensor, target_lse: Tensor) -> Tensor:
    """p fp32 [R, Vd] from the teacher's logits on draft-vocabulary rows [R, Vd] and its full log-sum-exp [R]."""
    return (teacher_logits.float() - target_lse.float()[:, None]).exp()


def forward_kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) per row [R] = sum_i p_i (log p_i - log q_i); terms with p_i = 0 count zero. Not clamped: mass < 1
    may go below 0.
    """
    return (p * (p.clamp_min(1e-30).log() - logits.float().log_softmax(-1))).sum(-1)


def cross_entropy(p: Tensor, logits: Tensor, target_index: Tensor) -> Tensor:
    """-log q at the target's argmax [R]; rows whose argmax lies outside the draft vocabulary (index -1) count zero."""
    log_q = logits.float().log_softmax(-1).gather(-1, target_index.clamp_min(0)[:, None])[:, 0]
    return -log_q * (target_index >= 0)


def acceptance(p: Tensor, logits: Tensor) -> Tensor:
    """alpha = sum_i min(p_i, q_i) [R]: the chance that a draft drawn from q is accepted (arXiv 2211.17192, theorem
    3.5).
    """
    return p.minimum(logits.float().softmax(-1)).sum(-1)


def hits(logits: Tensor, target_index: Tensor) -> Tensor:
    """Whether the draft's argmax is the target's, bool [R]. A target argmax outside the draft vocabulary (-1) is a
    miss.
    """
    return logits.argmax(-1) == target_index
