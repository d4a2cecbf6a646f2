"""Memory of a training process, by part and by moment: what is held all the time, and what each moment of a step adds.
Its peak is the largest moment's.

Held: the frozen target, the draft's fp32 masters (bf16 is autocast), its frozen tensors, AdamW's two fp32 moments.
Moments: the target's forward (online features), the loss at the end of the draft's forward, the start and the end of
its backward, the optimizer's step, the measurement of acceptance, and, before training, the writing of a feature shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.data.store import SHARD_TOKENS
from drafttrain.plan_activations import (
    ADAM,
    Setting,
    cast_weights,
    eagle3_saved,
    loss_gradients,
    loss_workspace,
    medusa_saved,
    student_layer,
    student_saved,
    tuned_target_layer,
)
from drafttrain.plan_shapes import FP32, DraftOutline
from drafttrain.plan_target import TargetOutline
from drafttrain.recipe import Recipe
from drafttrain.training import BUCKET

STATISTICS_CHUNK = 256
"""Positions whose whole-vocabulary logits exist at once (data/features.py)."""
TOKEN_FACTS = 8 + 1 + 8
"""Of a batch on the device, a token: its id, its mask, its label."""
TEACHER_FACTS = 4 + 8
"""target_lse fp32 and target_argmax int64."""
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Memory:
    """Bytes on one process. held: by part; moments: {moment: {part: bytes}}, without what is held."""

    held: dict[str, int]
    moments: dict[str, dict[str, int]]

    def at(self, moment: str) -> int:
        """All that exists at a moment."""
        return sum(self.held.values()) + sum(self.moments[moment].values())

    @property
    def largest(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=self.at)

    @property
    def peak(self) -> int:
        return self.at(self.largest)

    def facts(self) -> dict[str, Any]:
        """{"peak", "moment", "parts": of the peak, "moments": {name: bytes}}, json-able."""
        parts = {**self.held, **self.moments[self.largest]}
        return {
            "peak": self.peak,
            "moment": self.largest,
            "parts": {name: size for name, size in parts.items() if size},
            "moments": {moment: self.at(moment) for moment in self.moments},
        }


def feature_bytes(recipe: Recipe, draft: DraftOutline, target: TargetOutline, itemsize: int) -> int:
    """A token's features as a batch holds them: (A + 1) Ht values, and the teacher's statistics where they are taken.
    Of likeliest words: int64 id and fp32 log-probability each.
    """
    if recipe.features.source == "topk":
        return 12 * recipe.features.top_k + TEACHER_FACTS
    facts = TEACHER_FACTS if recipe.method == "eagle3" or recipe.data.draft_vocab is not None else 0
    return (len(draft.feature_layers) + 1) * target.model.H * itemsize + facts


def target_forward(recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting) -> int:
    """The most that a forward of the target for features needs, beside its weights.

    Either in its last layer: the states captured so far ((A + 1) Ht), the residual and normed stream, and the
    feed-forward's three matrices (silu(gate), up, product) - or behind it: captured states and their copies without
    padding, the features side by side, and a chunk of logits in d and in fp32.
    """
    shape, d, N = target.model.shape, setting.d, setting.tokens
    states = (len(draft.feature_layers) + 1) * shape.H * d
    inside = states + (3 * d + FP32) * shape.H + 3 * d * shape.I
    features = len(draft.feature_layers) * shape.H * setting.f
    facts = feature_bytes(recipe, draft, target, setting.f) > (len(draft.feature_layers) + 1) * shape.H * setting.f
    logits = min(STATISTICS_CHUNK, N) * target.model.vocab * (d + FP32) if facts else 0
    chunk = logits + (N * shape.H * d if facts else 0)  # The supervised positions' states are copied out.
    behind = 2 * states * N + max(chunk, features * N)
    return max(inside * N, behind)


def saved_bytes(recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting) -> int:
    """What the draft's forward keeps for its backward, the head's gradient apart."""
    again = recipe.training.gradient_checkpointing
    if recipe.method == "kd":
        layer = FP32 * draft.shape.H if again else student_layer(draft, setting)
        per_token = student_saved(draft, setting, layer)
    elif recipe.method == "eagle3":
        norms = int(recipe.draft.fc_norm) + int(recipe.draft.norm_before_fc)
        per_token = eagle3_saved(draft, setting, norms)
    else:
        per_token = medusa_saved(draft, setting)
        if draft.lora:
            H, layers = target.model.H, len(target.model.layers)
            layer = setting.d * H if again else tuned_target_layer(target, setting)
            per_token += layers * layer + FP32 * H
    return round(per_token * setting.tokens)


def made_again(recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting) -> int:
    """With training.gradient_checkpointing a layer keeps its input alone, and is run again in the backward: one at a
    time.
    """
    if not recipe.training.gradient_checkpointing:
        return 0
    small = recipe.method == "kd"
    layer = student_layer(draft, setting) if small else tuned_target_layer(target, setting)
    return round(layer * setting.tokens)


def step_memory(
    recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting, engine: str | None = None, N: int = 1
) -> Memory:
    """Memory of a process of N under an engine of ENGINES, None: alone. The target lies whole on each process, with
    target.shard its layers are spread over the N, taken for those of one machine. Where a process spreads the target
    over several devices (target.device_map), of the fullest: the draft and a step's tensors are taken to lie on one.

    DDP: gradients once more, in its buckets. FSDP2 gathers the draft as one unit in fp32 for forward and backward, its
    gradients are whole until the backward's end, then each process keeps its share. ZeRO (arXiv 1910.02054), all in
    fp32: each process has a partition of the masters and of the moments; gradients whole (1) or in partitions (2, 3),
    parameters whole (1, 2) or gathered for a step (3); a bucket of 5e7 gradients.
    """
    P = FP32 * draft.trained
    share = N if engine and engine != "ddp" else 1
    own = P // N if engine in ("fsdp2", "zero3") else P
    partition = P // N if engine and engine.startswith("zero") else 0
    teacher = target.bytes_of(N if recipe.target.shard else 1)
    held = _held(recipe, draft, teacher, target.itemsize, own + partition, ADAM * draft.trained // share)
    kept = P // N if engine in ("fsdp2", "zero2", "zero3") else P
    if recipe.training.gradient_accumulation_steps > 1:
        held["gradients (accumulated)"] = kept
    gathered = P if engine in ("fsdp2", "zero3") else 0
    buckets = {None: 0, "ddp": P if N > 1 else 0, "fsdp2": 0}.get(engine, FP32 * BUCKET)
    batch = setting.tokens * (feature_bytes(recipe, draft, target, setting.f) + TOKEN_FACTS)
    saved, casts = saved_bytes(recipe, draft, target, setting), cast_weights(draft, setting)
    kept_casts = cast_weights(draft, setting, kept=True)
    head, matrices = loss_gradients(draft), setting.c * draft.body
    states = draft.steps * setting.tokens * draft.head_width * setting.c
    new = 0 if "gradients (accumulated)" in held else 1
    moments = {
        "loss": {
            "features of a batch": batch,
            "activations": saved,
            "bf16 copies of weights": casts,
            "gathered weights": gathered,
            "loss": head + loss_workspace(draft, setting),
            "gradient buckets": buckets if engine == "ddp" else 0,
        },
        "backward, start": {
            # All but one unroll step's activations stand beside the first gradients of the matrices.
            "activations": max(saved, round(saved * (1 - 1 / draft.steps)) + matrices) if draft.steps > 1 else saved,
            "a layer made again": made_again(recipe, draft, target, setting),
            "bf16 copies of weights": kept_casts,
            "gathered weights": gathered,
            "loss": 2 * head + states,
            "gradient buckets": buckets,
        },
        "backward, end": {
            "bf16 copies of weights": kept_casts + casts,
            "gathered weights": gathered,
            "gradients": new * P,
            "gradient buckets": buckets,
        },
        "optimizer": {"gradients": new * kept, "gradient buckets": buckets if engine == "ddp" else 0},
    }
    if recipe.features.source in ("online", "hybrid") or recipe.training.on_policy is not None:
        forward = target_forward(recipe, draft, target, setting)
        moments = {"target forward": {"target's activations": forward + setting.tokens * TOKEN_FACTS}, **moments}
    if _measures(recipe):
        moments["measuring acceptance"] = _measuring(recipe, draft, target, setting)
    if recipe.features.source in ("store", "hybrid", "topk"):
        moments["writing features"] = _writing(recipe, draft, target, setting, held)
    return Memory(held, moments)


def _held(recipe: Recipe, draft: DraftOutline, teacher: int, itemsize: int, masters: int, adam: int) -> dict[str, int]:
    """Bytes held all the time; teacher: of the target, whose weights take `itemsize` each."""
    frozen = sum(part.parameters * part.itemsize for part in draft.parts if not part.trained)
    held = {
        "target": teacher,
        "draft, fp32 masters": masters,
        "draft, frozen": frozen + draft.copies,
        "optimizer": adam,
    }
    if recipe.method == "kd" and _measures(recipe):
        held["student as served"] = draft.trained * itemsize  # To measure acceptance with, and kept.
    return held


def _measures(recipe: Recipe) -> bool:
    """Whether drafts are selected by acceptance as served."""
    return bool(recipe.data.validation) and recipe.training.select_by != "loss"


def _measuring(recipe: Recipe, draft: DraftOutline, target: TargetOutline, setting: Setting) -> dict[str, int]:
    """The loop on as many prompts at a time as a batch holds: the target's keys and values, and the prompts' forward.
    (Training itself keeps none: no forward of it uses a cache.)
    """
    room = recipe.training.acceptance_prompts * setting.length
    tokens = min(recipe.training.max_tokens_per_batch, room)
    forward = target_forward(recipe, draft, target, replace(setting, tokens=tokens))
    return {"KV cache": tokens * target.kv_bytes // target.devices, "target's activations": forward}


def _writing(recipe: Recipe, draft, target, setting: Setting, held: Mapping[str, int]) -> dict[str, int]:
    """A shard's features twice (as they came, and joined), beside a forward; neither draft nor optimizer exist yet."""
    shard = 2 * SHARD_TOKENS * feature_bytes(recipe, draft, target, setting.f)
    size = min(recipe.features.batch_tokens, setting.tokens)
    forward = target_forward(recipe, draft, target, replace(setting, tokens=size))
    absent = {name: -held[name] for name in held if name != "target"}
    return {"a shard of features": shard, "target's activations": forward, "no draft yet": sum(absent.values())}
