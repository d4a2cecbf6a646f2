"""The numbers of a new recipe, each from the target's config: shapes, vocabulary, lengths, rows answered at a time."""

import math
from dataclasses import dataclass

from drafttrain.data.store import GIB
from drafttrain.init_facts import Facts, InitError
from drafttrain.nn.rotary import ROPE_TYPES
from drafttrain.target import UNSCALED_ROPES

WEIGHTS_SHARE = 0.6
"""Of a GPU's memory, at most so much for the target's weights; the rest is the batch's."""
NODE = 8
"""GPUs that one machine has at most, as a rule."""
SMALL = 1024
"""Targets narrower than this take the settings measured on Gemma 3 270M."""
HEADS = 4
FEATURES = 3


@dataclass(frozen=True)
class Shape:
    """An EAGLE-3 draft's attention and MLP; why_heads, why_inner: None where they are the target's own."""

    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    why_heads: str | None = None
    why_inner: str | None = None


def feature_layers(layers: int) -> list[int]:
    """[2, n//2, n-3], of fewer than 7 layers [1, n//2, n-1]; InitError where that is not three layers."""
    ids = [2, layers // 2, layers - 3] if layers >= 7 else [1, layers // 2, layers - 1]
    if len(set(ids)) < FEATURES:
        raise InitError(f"features.layers: the target has {layers} layers; expected at least 4 to read three of")
    return ids


def check_rotary(facts: Facts) -> None:
    """InitError where an EAGLE-3 draft, which turns positions by the target's RoPE, cannot."""
    parameters = facts.config.to_dict().get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    if "rope_theta" not in parameters:
        raise InitError(
            f"{facts.name}: model type {facts.kind!r} has no rotary positions, and EAGLE-3 drafts are served with the "
            "target's. Mend: --method medusa or kd"
        )
    kind = parameters.get("rope_type", "default")
    if kind not in (*ROPE_TYPES, *UNSCALED_ROPES):
        raise InitError(
            f"{facts.name}: its rotary positions are scaled by {kind!r}; EAGLE-3 drafts know {', '.join(ROPE_TYPES)}. "
            "Mend: --method medusa or kd"
        )


def draft_shape(facts: Facts) -> Shape:
    """The target's own heads and MLP width where a draft can have them."""
    heads, kv_heads, head_dim, why = facts.heads, facts.kv_heads, facts.head_dim, None
    if facts.latent:
        why = "the target's latent attention (MLA) is none that engines build in a draft"
    elif heads < 8:
        why = f"the target has {heads} heads of {head_dim}, few for one layer"
    elif heads % kv_heads or head_dim % 2:
        why = f"the target's {heads} heads, {kv_heads} of them for keys, of {head_dim} do not divide"
    if why is not None:
        head_dim = 128 if facts.width >= 4096 else 64 if facts.width >= 256 else 16
        heads = max(1, facts.width // head_dim)
        kv_heads = heads if facts.width < 2048 else max(g for g in range(1, 9) if heads % g == 0)
    inner, why_inner = _inner(facts)
    return Shape(heads, kv_heads, head_dim, inner, why, why_inner)


def _inner(facts: Facts) -> tuple[int, str | None]:
    """The MLP's width: the target's, unless that is one expert's and narrow."""
    values = facts.config.to_dict()
    if facts.inner and not (facts.experts and facts.inner < 2 * facts.width):
        return facts.inner, None
    dense = values.get("intermediate_size_mlp")
    if dense:
        return dense, "the width of its dense MLPs (intermediate_size_mlp)"
    if not facts.experts:
        return 3 * facts.width, "three times the width: config.json gives no intermediate_size"
    each = values.get("moe_intermediate_size") or facts.inner
    shared = values.get("n_shared_experts") or 0
    full = (facts.routed + shared) * each
    words = f"a token passes through {facts.routed + shared} experts of {each:,}"
    return (full, words) if full <= 4 * facts.width else (4 * facts.width, f"{words}; no more than 4 x width")


def draft_vocab(facts: Facts) -> int | None:
    """Head rows of the draft; None: all words, where there are hardly more than a draft vocabulary has."""
    wanted = 8192 if facts.width < SMALL else 32000
    return None if facts.vocab <= 1.25 * wanted else wanted


def max_length(facts: Facts) -> int:
    """Tokens of a training row."""
    return min(facts.positions, 2048 if facts.width < SMALL else 4096)


def answer_tokens(facts: Facts, thinks: bool) -> int:
    """data.regenerate.max_new_tokens: half of a row where the target thinks, else a quarter."""
    return max(1, max_length(facts) // (2 if thinks else 4))


def gpus(facts: Facts, memory: float) -> int:
    """GPUs over which the weights must be spread, whatever is trained."""
    return max(1, math.ceil(facts.weight_bytes / (WEIGHTS_SHARE * memory * GIB)))


def answer_batch(facts: Facts, memory: float, thinks: bool) -> int:
    """Rows answered at a time: keys and values in three quarters of what the weights leave."""
    free = 0.75 * (gpus(facts, memory) * memory * GIB - facts.weight_bytes)
    row = facts.cache_bytes * (max_length(facts) + answer_tokens(facts, thinks))
    return power_below(free / row, 64)


def power_below(number: float, most: int) -> int:
    """The largest power of two that is at most `number` and `most`, at least 1."""
    power = 1
    while 2 * power <= min(number, most):
        power *= 2
    return power
