"""Candidate sizes of small drafts: which are planned, their configs, and models of those shapes with random weights.

pruned:6 is six layers of the target with its width and head; fresh:128x4 a new model of width 128 and four layers.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.drafts.fresh_student import LAYER_LISTS, fresh_config, spread
from drafttrain.drafts.small_model import prune_layers
from drafttrain.drafts.student_parts import causal_class
from drafttrain.errors import UserError
from drafttrain.evaluate.roofline import FAMILIES, ModelShape, shape_of
from drafttrain.recipe import DraftConfig, TargetConfig
from drafttrain.target import Target
from drafttrain.target_files import find_folder, read_config

NARROWER, DEPTHS = (8, 4, 2), (1, 2, 4, 8)
"""Fresh candidates: the target's width by so much, so many layers."""
FORM = "pruned:LAYERS or fresh:WIDTHxLAYERS, e.g. pruned:6,fresh:128x4"


class PlanError(UserError):
    """A size, acceptance or report that nothing can be planned from."""


@dataclass(frozen=True)
class Size:
    """A candidate. pruned: `layers` of the target's, its width; fresh: a new model of width `hidden_size`."""

    kind: Literal["pruned", "fresh"]
    layers: int
    hidden_size: int | None = None

    def __str__(self) -> str:
        return f"pruned:{self.layers}" if self.kind == "pruned" else f"fresh:{self.hidden_size}x{self.layers}"

    def settings(self) -> dict[str, str | int]:
        """The keys of a recipe's `draft` section that train this size."""
        width = {"hidden_size": self.hidden_size} if self.kind == "fresh" else {}
        return {"student": self.kind, "num_hidden_layers": self.layers, **width}


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters. table: the embedding; head: rows that the head reads, `tied` where they are the table's;
    body: all the rest. itemsize: bytes of each. experts: those of the body that a step is expected to leave unread.
    """

    table: int
    head: int
    body: int
    tied: bool
    itemsize: int
    experts: int = 0

    @property
    def read(self) -> int:
        """What a step reads."""
        return self.body + self.head - self.experts

    @property
    def parameters(self) -> int:
        """Stored ones."""
        return self.table + self.body + (0 if self.tied else self.head)

    def facts(self) -> dict[str, int]:
        """{"parameters", "table", "head", "body", "bytes", "forward_bytes"}; forward_bytes: what a step reads."""
        return {
            "parameters": self.parameters,
            "table": self.table,
            "head": self.head,
            "body": self.body,
            "bytes": self.parameters * self.itemsize,
            "forward_bytes": self.read * self.itemsize,
        }


def weights_of(model: Target, tokens: int = 1) -> Weights:
    """Counted in a model at hand. tokens: in a step (requests at a time), which decide how many experts it reads."""
    head, table = model.lm_head_weight, model.embed_weight
    body = sum(p.numel() for p in model.model.parameters() if p is not head and p is not table)
    config = model.config
    experts = unread_experts(shape_of(config), tokens) if config.model_type in FAMILIES else 0
    return Weights(table.numel(), head.numel(), body, head is table, table.element_size(), experts)


def unread_experts(shape: ModelShape, tokens: int) -> int:
    """Parameters of the experts that a step over so many tokens is expected to leave out; 0 for dense models."""
    return round(shape.moe_layers * (shape.experts - shape.touched(tokens)) * shape.expert)


def weights_from(config: PretrainedConfig, head_rows: int | None = None, itemsize: int = 2, tokens: int = 1) -> Weights:
    """Counted from a config; tokens as in `weights_of`. RooflineError for a model type that is not counted."""
    shape, width = shape_of(config, head_rows), config.hidden_size
    table, head = config.vocab_size * width, (head_rows or config.vocab_size) * width
    tied = not shape.table
    body, unread = shape.parameters - head - shape.table, unread_experts(shape, tokens)
    return Weights(table, head, body, tied, itemsize, unread)


def config_of(settings: TargetConfig) -> PretrainedConfig:
    """The text config of a target whose weights are not wanted: of a hub id only the config is downloaded.

    TargetError where there is none, within seconds without a network.
    """
    where = (settings.name_or_path, settings.gguf_file, settings.revision, settings.trust_remote_code)
    path = find_folder(*where, weights=False)
    return read_config(str(path), settings.trust_remote_code).get_text_config(decoder=True)


def default_sizes(config: PretrainedConfig) -> list[Size]:
    """Pruned to 2 and to a sixth, quarter, third and half of the layers; fresh ones from wide and shallow to narrow
    and deep.
    """
    n, width = config.num_hidden_layers, config.hidden_size
    kept = sorted({count for count in (2, n // 6, n // 4, n // 3, n // 2) if 2 <= count < n})
    widths = sorted({width // part // 8 * 8 for part in NARROWER} - {0})
    fresh = [Size("fresh", depth, narrow) for narrow in widths for depth in DEPTHS if depth <= n]
    return [*(Size("pruned", count) for count in kept), *fresh]


def parse_sizes(text: str, config: PretrainedConfig) -> list[Size]:
    """The sizes of a text such as "pruned:6,fresh:128x4", checked. PlanError names the first that is wrong."""
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"pruned:(\d+)|fresh:(\d+)x(\d+)", part.strip())
        if not found:
            raise PlanError(f"the size {part.strip()!r} cannot be read; expected {FORM}")
        kept, width, depth = found.groups()
        size = Size("pruned", int(kept)) if kept else Size("fresh", int(depth), int(width))
        check_size(size, config)
        sizes.append(size)
    return list(dict.fromkeys(sizes))


def check_size(size: Size, config: PretrainedConfig) -> None:
    """PlanError for a size that this target has no draft of."""
    n = config.num_hidden_layers
    least, most = (2, n - 1) if size.kind == "pruned" else (1, n)
    if not least <= size.layers <= most:
        raise PlanError(
            f"{size} has {size.layers} layers; expected {least} to {most}: the target has {n}, and a pruned draft "
            "keeps the first and the last of them, but not all"
        )
    if size.kind == "fresh" and (size.hidden_size % 8 or not 8 <= size.hidden_size <= config.hidden_size):
        raise PlanError(
            f"{size} is {size.hidden_size} wide; expected a multiple of 8, at least 8 and at most the target's "
            f"{config.hidden_size}: it divides into heads, and kernels read eight values at once"
        )


@dataclass(frozen=True)
class Outline:
    """What a student's config takes from a target whose weights need not be at hand."""

    config: PretrainedConfig

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def head_dim(self) -> int:
        return self.config.to_dict().get("head_dim") or self.hidden_size // self.config.num_attention_heads


def student_config(size: Size, config: PretrainedConfig) -> PretrainedConfig:
    """The config that a draft of this size is trained with. DraftError for a width that has no heads to divide into."""
    if size.kind == "fresh":
        return fresh_config(DraftConfig(**size.settings()), Outline(config))
    small, values = copy.deepcopy(config), config.to_dict()
    for name in LAYER_LISTS:
        if values.get(name) is not None:
            setattr(small, name, [values[name][i] for i in spread(config.num_hidden_layers, size.layers)])
    small.num_hidden_layers = size.layers
    return small


def build_models(sizes: Sequence[Size], target: Target) -> dict[str, Target]:
    """{label: a model of that size} on the target's device and in its dtype: pruned ones share the target's weights,
    fresh ones have random weights and share the tables of one width.
    """
    models: dict[str, Target] = {}
    tables: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for size in sizes:
        if size.kind == "pruned":
            models[str(size)] = prune_layers(target, spread(target.num_layers, size.layers))
            continue
        model = _random_model(student_config(size, target.config), target)
        parts = model.get_input_embeddings(), model.get_output_embeddings()
        shared = tables.setdefault(size.hidden_size, tuple(part.weight for part in parts))
        for part, weight in zip(parts, shared, strict=True):
            part.weight = weight
        models[str(size)] = Target.from_model(model, None, str(size))
    return models


def _random_model(config: PretrainedConfig, target: Target) -> PreTrainedModel:
    with torch.random.fork_rng(), target.device:
        torch.manual_seed(0)
        model = causal_class(target.model)(config)
    for parameter in model.parameters():  # Not `.to`: the buffers of rotary positions stay fp32.
        parameter.data = parameter.data.to(target.dtype)
    return model
