"""FLOPs of a training and the device hours they take at an assumed utilisation; the cost of regenerated answers beside.

A product of a token with a matrix of P parameters takes 2 P FLOPs forward; its backward 2 P for the input's gradient
and 2 P for the weight's (Kaplan et al., arXiv 2001.08361, section 2.1). Causal attention over rows of T tokens: q k^T
and p v over T / 2 keys on average, 2 q T forward and 2.5 times that backward (flash kernels recompute the scores).
"""

from dataclasses import dataclass
from typing import Any

from drafttrain.data.sources import needs_statistics
from drafttrain.evaluate.roofline import Device, Roofline, RooflineError, layer_seconds_on, shape_of
from drafttrain.plan_data import Volume
from drafttrain.plan_shapes import DraftOutline
from drafttrain.plan_target import TargetOutline
from drafttrain.recipe import Recipe

UTILISATION = 0.35
"""Of a data sheet's peak: an assumption. (EAGLE-3 for an 8B target on 200k samples is published at 16 A100 hours; the
counts below give that at .35 for one epoch of samples of 1,000 tokens, whose length is not published.)
"""
CPU_UTILISATION = 0.5
"""Of the rate of large products measured on a CPU: assumed, the rest goes to elementwise work."""


@dataclass(frozen=True)
class Flops:
    """FLOPs a trained token: target forward with its teacher's head, the draft's layers, its head."""

    target: float
    statistics: float
    draft: float
    head: float

    @property
    def step(self) -> float:
        """Without the target's forward."""
        return self.draft + self.head


def flops_of(recipe: Recipe, draft: DraftOutline, target: TargetOutline, data: Volume) -> Flops:
    """Of a token: everything that depends on supervision counts only where the target speaks.

    target: 2 P of its layers, and attention. statistics: the whole head where target_lse is taken. draft: fc has no
    input gradient (4 P); each unroll step and each small model 6 P, frozen layers with adapters 4 P; first Medusa
    layers 4 P. head: each step 6 V H (frozen: 4), and the teacher's rows once, 2 V Ht.
    """
    model, T, share = target.model, data.length, data.share
    again = recipe.training.gradient_checkpointing  # Layers run forward once more.
    forward = 2 * model.active + 2 * model.shape.q * T * len(model.layers)
    statistics = 2 * model.vocab * model.H * share if needs_statistics(recipe) else 0.0
    each_head = (6 if draft.learns_head else 4) * draft.head_rows * draft.head_width
    head = share * (draft.steps * each_head + 2 * draft.head_rows * model.H)
    if recipe.method == "eagle3":
        attention = 7 * draft.shape.q * T * draft.depth
        fuse = sum(part.parameters for part in draft.parts if part.name == "fusion")
        body = 4 * fuse + draft.steps * (6 * draft.body + attention)
    elif recipe.method == "medusa":
        first = draft.body / draft.depth
        body = 4 * first + 6 * (draft.body - first)
        if draft.lora:  # The tuned target once more, forward and input gradients, and the anchor over every word.
            body += (2 + again) * forward + 6 * draft.lora
            head += share * 6 * model.vocab * model.H
    else:
        adapted = any(part.name == "adapters" for part in draft.parts)
        body = (4 if adapted else 6) * draft.body + 7 * draft.shape.q * T * draft.depth
        body += again * 2 * (draft.body + draft.shape.q * T * draft.depth)
    return Flops(forward, statistics, body, head)


@dataclass(frozen=True)
class Work:
    """Tokens that are trained on, over all epochs, and target forwards for their features."""

    trained: int
    epochs: float
    steps: int
    forwards: int
    note: str | None = None


def work_of(recipe: Recipe, data: Volume, processes: int, stored_share: float = 1.0) -> Work:
    """What the recipe's length of training comes to. stored_share: of the rows, those that a hybrid store holds."""
    training = recipe.training
    per_step = training.max_tokens_per_batch * training.gradient_accumulation_steps * processes
    trained, note = data.tokens * training.num_train_epochs, None
    if training.max_steps > 0:
        trained = min(training.max_steps * per_step, training.max_steps * data.tokens)
    if training.max_minutes is not None:
        note = f"training.max_minutes {training.max_minutes:g} may end it sooner"
    epochs = trained / data.tokens
    stored = {"store": 1.0, "vllm": 1.0, "topk": 1.0, "hybrid": stored_share}.get(recipe.features.source, 0.0)
    forwards = stored * data.tokens + (1 - stored) * trained
    return Work(round(trained), epochs, max(1, round(trained / per_step)), round(forwards), note)


def hours_of(flops: float, device: Device, utilisation: float) -> float:
    """Hours of one device."""
    return flops / (device.flops * utilisation) / 3600


def regeneration(recipe: Recipe, target: TargetOutline, data: Volume, device: Device) -> dict[str, Any] | None:
    """{"device", "tokens", "batch", "kv_cache" [bytes], "server", "hours" | None, "tokens_per_second" | None,
    "reason"}: every prompt answered anew, decoded in batches on one device, by the roofline; None where the recipe does
    not ask for it.
    """
    settings = recipe.data.regenerate
    if settings is None or "train" not in settings.splits:
        return None
    answer = min(data.supervised / max(data.rows, 1), settings.max_new_tokens)
    batch = settings.batch_size if settings.server is None else settings.concurrency
    context = min(data.longest, data.length - data.supervised / max(data.rows, 1) + settings.max_new_tokens)
    facts = {"kv_cache": round(batch * context) * target.kv_bytes}
    facts |= {"device": device.name, "tokens": round(answer * data.rows), "batch": batch, "server": settings.server}
    try:
        shape = shape_of(target.model.config)
    except RooflineError as error:
        return {**facts, "hours": None, "tokens_per_second": None, "reason": str(error)}
    line = Roofline(device, weight_bytes=target.bytes / target.parameters, layer_overhead=layer_seconds_on(device))
    rate = batch / line.seconds(shape, 1, batch, data.length / 2)
    return {**facts, "hours": facts["tokens"] / rate / 3600, "tokens_per_second": rate, "reason": None}
