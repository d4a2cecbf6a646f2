"""Which of a run's drafts is kept, and when a run that gains no more ends: by acceptance length as served, measured
while training in the evaluator's own loop, or by validation loss.

The loss may still fall where acceptance has passed its best, and teacher-forced hits know nothing of a draft that runs
on its own words: so what is kept is chosen by what serving counts.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import Draft
from drafttrain.recipe import TrainingConfig
from drafttrain.specdec.decode import generate
from drafttrain.specdec.metrics import Counts
from drafttrain.target import Target
from drafttrain.training.on_policy import cut

LENGTH, LOSS = "eval_acceptance_length", "eval_loss"
"""Keys of the log: tau of the loop, which is never teacher-forced; validation loss in nats a row."""


def gains(key: str, value: float, best: float | None) -> bool:
    """Whether a value is better than the best before it: a larger length, a smaller loss, and no NaN."""
    if math.isnan(value):
        return False
    return best is None or (value > best if key == LENGTH else value < best)


def waited(history: Sequence[Mapping[str, Any]], key: str) -> int:
    """How many measurements of `key` followed the best one, in a log in the order of its steps."""
    best, count = None, 0
    for value in (row[key] for row in history if key in row):
        if gains(key, value, best):
            best, count = value, 0
        else:
            count += 1
    return count


class Acceptance:
    """Measures drafts on fixed prompts, greedy, `settings.acceptance_k` drafts a round (at most as deep as they go).

    rows: of the validation data. Each gives a prompt: what stands before a supervised stretch, of plain text a part
    (`on_policy.cut`, drawn from the seed and the row's place). Rows that leave no room for acceptance_new_tokens are
    left out; of the others acceptance_prompts are taken, evenly spread. RunError where none is left.
    """

    def __init__(self, target: Target, settings: TrainingConfig, rows: Sequence[Mapping[str, Any]]):
        self.target, self.settings = target, settings
        room = target.max_positions - settings.acceptance_new_tokens + 1  # The last token is never run.
        prompts = []
        for place, row in enumerate(rows):
            if any(row["loss_mask"]):
                end = cut(row["loss_mask"], random.Random(f"{settings.seed}:{place}"))
                prompts += [list(row["input_ids"][:end])] if end <= room else []
        if not prompts:
            raise RunError(
                f"None of {len(rows)} validation rows can be continued by {settings.acceptance_new_tokens} tokens "
                f"within the {target.max_positions} positions of {target.title}. Expected one at least, to select the "
                "draft by. Mend: lower training.acceptance_new_tokens, or training.select_by: loss."
            )
        count = min(settings.acceptance_prompts, len(prompts))
        self.prompts = [prompts[i * len(prompts) // count] for i in range(count)]

    @classmethod
    def of(cls, settings: TrainingConfig, target: Target, rows: Mapping[str, Sequence[Mapping]]) -> Self | None:
        """What the recipe asks for; None where drafts are selected by loss, or there is no validation data."""
        if settings.select_by == "loss" or not rows.get("validation"):
            return None
        return cls(target, settings, rows["validation"])

    def due(self, step: int) -> bool:
        """Whether the validation at a step measures acceptance too."""
        return step % (self.settings.acceptance_steps or self.settings.eval_steps) == 0

    def measure(
        self, draft: Draft, rank: int = 0, world_size: int = 1, ends: Callable[[], bool] = lambda: False
    ) -> Counts:
        """The loop's counts over this rank's share of the prompts, pooled, with the draft's weights of now. ends: asked
        before each group of prompts, whether to leave out the rest.

        The draft's mode and the global random states are as before when it returns, and also when it raises, which is
        what `generate` raises.
        """
        counts = Counts()
        with undisturbed(draft):
            target = draft.served_by(self.target)
            proposer = draft.proposer(target)
            k = min(self.settings.acceptance_k, proposer.max_k or self.settings.acceptance_k)
            for prompts in self._groups(self.prompts[rank::world_size]):
                if ends():
                    break
                # Not captured as CUDA graphs: they would hold memory that training needs.
                done = generate(
                    target,
                    prompts,
                    proposer,
                    k=k,
                    max_new_tokens=self.settings.acceptance_new_tokens,
                    stop_ids=self.target.stop_ids,
                    capture=False,
                )
                counts.add(done.counts)
        return counts

    def _groups(self, prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
        """Prompts of like length, as many at a time as training.max_tokens_per_batch holds with what they grow to."""
        group: list[list[int]] = []
        for prompt in sorted(prompts, key=len):
            width = len(prompt) + self.settings.acceptance_new_tokens
            if group and (len(group) + 1) * width > self.settings.max_tokens_per_batch:
                yield group
                group = []
            group.append(prompt)
        if group:
            yield group


@contextmanager
def undisturbed(draft: Draft) -> Iterator[None]:
    """The draft in eval mode; afterwards every module's mode and all global random states are as they were."""
    modes = [(module, module.training) for module in draft.modules()]
    device = next(draft.parameters()).device
    states = random.getstate(), np.random.get_state()
    draft.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, mode in modes:
            module.training = mode
