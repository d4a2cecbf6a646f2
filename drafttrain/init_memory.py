"""How many tokens a batch of a new recipe may have: the recipe itself, counted as `drafttrain plan` counts it."""

from dataclasses import dataclass

from drafttrain.data.store import GIB
from drafttrain.init_facts import Facts
from drafttrain.init_numbers import NODE, SMALL, gpus, max_length
from drafttrain.plan_cost import USABLE, setting_of
from drafttrain.plan_memory import Memory, step_memory
from drafttrain.plan_shapes import outline_draft
from drafttrain.plan_target import ModelOutline
from drafttrain.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """training.max_tokens_per_batch; over how many GPUs the target is spread; and GiB on the fullest of them: the
    target's share, the draft with its optimizer, and what a step adds at its largest moment.
    """

    tokens: int
    gpus: int = 1
    target: float = 0.0
    draft: float = 0.0
    step: float = 0.0

    @property
    def total(self) -> float:
        return self.target + self.draft + self.step


def largest_batch(facts: Facts, recipe: Recipe, memory: float, student: ModelOutline | None = None) -> Batch:
    """The largest power of two that fits into 90% of `memory` GiB, no more than 16,384 tokens (8,192 for small targets)
    and no less than a row, which more GPUs make room for, up to a machine's eight. student: of a small model that the
    recipe trains.
    """
    room, least = USABLE * memory * GIB, max_length(facts)
    draft = outline_draft(recipe, facts.spread(1), student)

    def taken(tokens: int, count: int) -> Memory:
        training = recipe.training.model_copy(update={"max_tokens_per_batch": tokens})
        sized, target = recipe.model_copy(update={"training": training}), facts.spread(count)
        return step_memory(sized, draft, target, setting_of(sized, target, "cuda"))

    count = gpus(facts, memory)
    while count < NODE and taken(least, count).peak > room:
        count += 1
    tokens = 8192 if facts.width < SMALL else 16384
    while tokens > least and taken(tokens, count).peak > room:
        tokens //= 2
    tokens = max(tokens, least)
    found = taken(tokens, count)
    target = found.held["target"]
    held = sum(found.held.values()) - target
    return Batch(tokens, count, target / GIB, held / GIB, (found.peak - target - held) / GIB)
