"""Learning rate as a function of progress, so that a budget in minutes ends its decay when the minutes end."""

import math


def learning_rate_factor(
    kind: str, step: int, progress: float, warmup_steps: int, decay_fraction: float, min_ratio: float
) -> float:
    """The factor on the peak learning rate at `step` and `progress` in [0, 1].

    Linear warm-up over `warmup_steps`; then wsd: constant, and linear down to min_ratio over the last decay_fraction
    of the run; cosine or linear: down to min_ratio at progress 1; constant.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    if kind == "wsd":
        done = (progress - (1 - decay_fraction)) / decay_fraction if decay_fraction else 0.0
        return 1 - (1 - min_ratio) * min(max(done, 0.0), 1.0)
    if kind == "cosine":
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - min_ratio) * progress
