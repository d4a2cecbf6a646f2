"""A narrow new model of the target's own class, whose embedding and head start as the best low-rank factor of the
target's (Eckart-Young).

E [V, Ht] is nearest to (E P) P^T of rank h where P [Ht, h] holds the top eigenvectors of E^T E; the student starts
with E P.
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.small_model import PER_LAYER
from drafttrain.drafts.student_parts import causal_class, renew, set_trained, table_names
from drafttrain.drafts.vocabulary import random_tokens
from drafttrain.recipe import DraftConfig
from drafttrain.target import Target

LAYER_LISTS = (*PER_LAYER, "no_rope_layers")
"""Config entries that hold one value for each layer."""
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
"""Further widths of feed-forward layers, which keep the target's ratio as intermediate_size does."""
CHUNK = 1 << 13
EXCESS = 0.25
"""Nats above ln V that a fresh model may start with, over labels drawn at random."""


def spread(length: int, count: int) -> list[int]:
    """`count` numbers out of 0 .. length-1 at even distances, the first and the last among them; rising."""
    if count == 1:
        return [0]
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def fresh_config(settings: DraftConfig, target: Target) -> PretrainedConfig:
    """The target's text config with the student's sizes; vocabulary, positions, RoPE and eps stay the target's.

    Defaults: 2 layers, the target's ratios of heads and feed-forward width to hidden size, its head_dim. Lists of one
    value a layer take the target's values at evenly spread layers, one with full attention among them where the target
    has it, or go round them where the student is deeper. DraftError where sizes are missing or do not divide.
    """
    hidden = settings.hidden_size
    if hidden is None:
        half = max(64, target.hidden_size // 128 * 64)
        raise DraftError(
            "draft.student is fresh and draft.hidden_size is not given. Expected the width of the new model, below "
            f"the target's {target.hidden_size}. Mend: draft.hidden_size: {half}."
        )
    if hidden > target.hidden_size:
        raise DraftError(
            f"draft.hidden_size is {hidden}, the target's {target.hidden_size}. Expected at most that: a fresh student "
            "starts from a low-rank factor of the target's embedding. Mend: a smaller draft.hidden_size."
        )
    values = target.config.to_dict()
    heads, groups, head_dim = _heads(settings, target, values)
    width = settings.intermediate_size or _ratio(hidden, values["intermediate_size"], target.hidden_size)
    layers = settings.num_hidden_layers or 2
    changes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "dtype": torch.float32,
    }
    if values.get("head_dim") is not None:
        changes["head_dim"] = head_dim
    if values.get("query_pre_attn_scalar") is not None:
        changes["query_pre_attn_scalar"] = round(values["query_pre_attn_scalar"] * head_dim / target.head_dim)
    for name in WIDTHS:
        if values.get(name) is not None:
            changes[name] = _ratio(width, values[name], values["intermediate_size"])
    places = _places(target.num_layers, layers, values.get("layer_types") or [])
    for name in LAYER_LISTS:
        if values.get(name) is not None:
            changes[name] = [values[name][i] for i in places]
    config = copy.deepcopy(target.config)
    for name, value in changes.items():
        setattr(config, name, value)
    vars(config).pop("quantization_config", None)  # The target's; the new weights are plain.
    return config


def _places(n: int, layers: int, kinds: list[str]) -> list[int]:
    """The target's layer that each of the student's takes its kind from; the last one has full attention where all
    others look through a window.
    """
    if layers > n:
        return [i % n for i in range(layers)]
    places = spread(n, layers)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if full and not set(full) & set(places):
        places[-1] = full[-1]
    return places


def _ratio(size: int, part: int, whole: int) -> int:
    """size * part / whole, as a multiple of 8."""
    return max(8, round(size * part / whole / 8) * 8)


def _heads(settings: DraftConfig, target: Target, values: dict) -> tuple[int, int, int]:
    """(query heads, key-value heads, head_dim): what is not given comes nearest to the target's proportions.

    Heads divide the hidden size, as several families demand; without a head_dim of its own in the config it is
    hidden_size / heads.
    """
    hidden, free = settings.hidden_size, values.get("head_dim") is not None
    head_dim = settings.head_dim or (target.head_dim if free else None)
    their_heads = target.config.num_attention_heads
    their_groups = values.get("num_key_value_heads") or their_heads
    per_head = target.hidden_size / their_heads if free else (settings.head_dim or target.head_dim)
    groups = settings.num_key_value_heads
    fitting = [h for h in range(1, hidden + 1) if hidden % h == 0 and h % (groups or 1) == 0]
    if not free:
        fitting = [h for h in fitting if hidden // h % 2 == 0]
    if settings.num_attention_heads is not None:
        fitting = [h for h in fitting if h == settings.num_attention_heads]
    heads = min(fitting, key=lambda h: abs(math.log(h * per_head / hidden)), default=None)
    if heads is not None and head_dim is None:
        head_dim = hidden // heads
    if heads is None or head_dim % 2 or (not free and head_dim * heads != hidden):
        raise DraftError(
            f"draft.hidden_size {hidden}, num_attention_heads {settings.num_attention_heads}, num_key_value_heads "
            f"{groups} and head_dim {settings.head_dim} do not fit together. Expected heads that divide the hidden "
            f"size and are a multiple of the key-value heads, an even head_dim{'' if free else ', heads * head_dim = '}"
            f"{'' if free else 'hidden_size'}. Mend: give draft.hidden_size alone, a multiple of 64."
        )
    if groups is None:
        wish = heads * their_groups / their_heads
        groups = max(g for g in range(1, heads + 1) if heads % g == 0 and g <= max(1, wish))
    return heads, groups, head_dim


@torch.no_grad()
def low_rank(table: Tensor, rank: int) -> Tensor:
    """E P, fp32 [V, rank], of the table E [V, Ht]: its best approximation of that rank, in P's coordinates."""
    basis = principal_axes(table, rank)
    return torch.cat([rows.float() @ basis for rows in table.split(CHUNK)])


@torch.no_grad()
def principal_axes(table: Tensor, rank: int) -> Tensor:
    """P fp32 [Ht, rank], orthonormal: the directions that hold most of a table E [V, Ht].

    E^T E is summed in fp64 over chunks of rows; the sign of each column is fixed, so that the result is too.
    """
    gram = torch.zeros(table.shape[1], table.shape[1], dtype=torch.float64, device=table.device)
    for rows in table.split(CHUNK):
        wide = rows.float()
        gram += (wide.T @ wide).double()
    basis = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    return (basis * largest.sign()).float()


def fresh_student(settings: DraftConfig, target: Target, seed: int = 0) -> PreTrainedModel:
    """A new fp32 model on the target's device: tables by `low_rank`, tied where the target's are, the rest as the
    class draws it with this seed, the final norm's gain lowered until the first loss is about ln V.

    Everything trains; with draft.train_embeddings false not the tables, which then have the target's dtype.
    """
    config = fresh_config(settings, target)
    config.tie_word_embeddings = target.lm_head_weight is target.embed_weight  # A wrapper's text config may not say.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = causal_class(target.model)(config)
    model = model.to(target.device)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight = nn.Parameter(low_rank(target.embed_weight, config.hidden_size))
    if target.lm_head_weight is target.embed_weight:
        head.weight = embedding.weight
    else:
        head.weight = nn.Parameter(low_rank(target.lm_head_weight, config.hidden_size))
    if head.bias is not None:
        head.bias = nn.Parameter(target.lm_head_bias.detach().to(torch.float32, copy=True))
    _soften(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if settings.train_embeddings is False:
        tables = table_names(model)
        renew(model, lambda name, tensor: nn.Parameter(tensor.to(target.dtype) if name in tables else tensor))
        names -= tables
    return set_trained(model, names)


@torch.no_grad()
def _soften(model: PreTrainedModel) -> None:
    """Halve the final norm's gain until lse - mean logit exceeds what a head's bias alone gives (ln V without one) by
    EXCESS at most, over random tokens.

    Embeddings that also are the head give the token just read a high logit: at full gain a tied model starts far above
    ln V.
    """
    view = Target.from_model(model)
    n, V = view.num_layers, view.vocab_size
    states = view.hidden_states(random_tokens(V)[:1], None, [n])[n]
    head = view.head()
    normed = head.normed(states)[0]

    def excess(gain: float) -> float:
        logits = [head.logits(rows * gain) for rows in normed.split(8)]
        return torch.cat([z.logsumexp(-1) - z.mean(-1) for z in logits]).mean().item() - math.log(V)

    gain, limit = 1.0, excess(0.0) + EXCESS
    while excess(gain) > limit:
        gain /= 2
    norm, weight = view.final_norm, view.final_norm.weight
    expected, old = head.normed(states) * gain, weight.clone()
    weight.mul_(gain)
    if not torch.allclose(norm(states), expected, rtol=1e-3, atol=1e-5):
        weight.copy_((1 + old) * gain - 1)  # Gemma's norms multiply by 1 + weight.
        assert torch.allclose(norm(states), expected, rtol=1e-3, atol=1e-5)
