"""What speculative decoding is worth on hardware one does not have: a roofline from a model's config alone.

T(n tokens, B rows, S cached) = max((W + B S kv) / bandwidth, 2 P n B / FLOPs) + overhead (Williams et al. 2009).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.errors import UserError
from drafttrain.evaluate.cost import CostModel, break_even, tau_at
from drafttrain.evaluate.cpu_speed import best_seconds, bf16_is_emulated


class RooflineError(UserError):
    """A device or a target that the roofline has no numbers for."""


@dataclass(frozen=True)
class Device:
    """bandwidth: memory, bytes/s; flops: dense bf16 matrix products with fp32 accumulation, FLOP/s (of a CPU without
    bf16 instructions: float32 products); memory: bytes, None where that is not known.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float | None = None

    def ridge(self, weight_bytes: float = 2.0) -> float:
        """n* tokens in a forward: from there on it is bound by compute. F / BW for weights of 2 bytes."""
        return self.flops / self.bandwidth * weight_bytes / 2


# Peak figures as the vendor's data sheets give them, without sparsity. What is reached is less on both axes (about
# .75 to .9), so the ratios below hold better than the seconds.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", 2.039e12, 312e12, 80e9),  # A100 80GB SXM data sheet, 2021
        Device("H100", 3.35e12, 989e12, 80e9),  # H100 SXM data sheet (1,979 with sparsity), 2023
        Device("H200", 4.8e12, 989e12, 141e9),  # H200 SXM data sheet, 2024
        Device("B200", 8.0e12, 2250e12, 180e9),  # HGX B200: Blackwell architecture brief (4,500 with sparsity), 2024
        Device("L40S", 0.864e12, 362e12, 48e9),  # L40S data sheet (733 with sparsity), 2023
        Device("4090", 1.008e12, 165.2e12, 24e9),  # Ada architecture white paper, RTX 4090: bf16 with fp32 accumulate
    )
}


def find_device(name: str) -> Device:
    """A named device, with or without its maker's name; "cpu" is measured here. RooflineError for others."""
    if name.lower() == "cpu":
        return measure_cpu()
    words = name.upper().replace("-", " ").split()
    found = [device for known, device in DEVICES.items() if known in words]
    if len(found) != 1:
        raise RooflineError(f"device is {name!r}; expected one of {', '.join(DEVICES)} or cpu")
    return found[0]


def measure_cpu(megabytes: int = 256, width: int = 1024, repeats: int = 5) -> Device:
    """This machine, with torch's threads: the best of some copies of a block and of some products in bf16 or, where
    that is emulated, in float32.
    """
    source = torch.ones(megabytes * 2**20 // 4)
    copy = torch.empty_like(source)
    left = torch.ones(width, width, dtype=torch.float32 if bf16_is_emulated() else torch.bfloat16)
    moved, operations = 2 * source.numel() * 4, 2 * width**3
    return Device(
        "cpu",
        moved / best_seconds(lambda: copy.copy_(source), repeats),
        operations / best_seconds(lambda: left @ left, repeats),
    )


LAYER_SECONDS = 30e-6


def layer_seconds_on(device: Device) -> float:
    """What a layer of a small model takes at least, assumed: on a GPU some ten kernels of a few microseconds each,
    replayed as a graph; nothing on a CPU, which waits for bytes.
    """
    return 0.0 if device.name == "cpu" else LAYER_SECONDS


def assumptions(device: str, layer_seconds: float) -> str:
    """What a roofline's figures rest on, for the line below them. device: its name; layer_seconds: of each layer."""
    peak = "rates measured on this CPU" if device == "cpu" else "the data sheet's peak"
    kernels = f"{1e6 * layer_seconds:.3g} us a layer of target and draft for starting its kernels"
    return f"bytes and FLOPs at {peak}, {kernels if layer_seconds else 'nothing for starting kernels'}"


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters and of cached values, from which a forward's bytes and FLOPs follow.

    fixed: what every forward reads (attention, dense MLPs, norms, routers, head); table: an embedding that is not the
    head, of which a forward reads a few rows; one expert of one layer has `expert` parameters, `moe_layers` layers have
    `experts` of them, each token using `topk`. kv: (values cached per token, window or None) of each layer.
    """

    fixed: int
    table: int = 0
    expert: int = 0
    experts: int = 0
    topk: int = 0
    moe_layers: int = 0
    kv: tuple[tuple[int, int | None], ...] = ()

    @property
    def parameters(self) -> int:
        """All of them, as a checkpoint holds them."""
        return self.fixed + self.table + self.moe_layers * self.experts * self.expert

    @property
    def active(self) -> int:
        """P: what a token is multiplied with."""
        return self.fixed + self.moe_layers * self.topk * self.expert

    def touched(self, tokens: float) -> float:
        """Distinct experts of a layer that a forward over so many tokens is expected to read: E (1 - (1 - k/E)^n)."""
        return self.experts * (1 - (1 - self.topk / self.experts) ** tokens) if self.experts else 0.0

    def read(self, tokens: float) -> float:
        """W in parameters: what a forward over so many tokens reads."""
        return self.fixed + self.moe_layers * self.touched(tokens) * self.expert

    def cached(self, context: float) -> float:
        """Cached values that one row's forward reads behind so many tokens; sliding windows hold no more than that."""
        return sum(values * min(context, window or context) for values, window in self.kv)


@dataclass(frozen=True)
class _Family:
    """How a model type departs from Llama. norms: of width H in a layer; bias: qkv projections always have one."""

    norms: int = 2
    head_norms: bool = False
    bias: bool = False
    sinks: bool = False
    expert_bias: bool = False


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "phi3", "mixtral", "gemma"), _Family()),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _Family(head_norms=True)),
    "qwen2": _Family(bias=True),
    "gemma2": _Family(norms=4),
    "gemma3_text": _Family(norms=4, head_norms=True),
    "gpt_oss": _Family(sinks=True, expert_bias=True),
}


def shape_of(config: PretrainedConfig, head_rows: int | None = None) -> ModelShape:
    """The shape of a transformers model, from its config. head_rows: of a draft whose head has so many words alone, a
    copy beside the table. RooflineError for a model type that is not counted here.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        raise RooflineError(
            f"model_type is {text.model_type!r}; the roofline counts {', '.join(FAMILIES)}. "
            "Mend: measure this target instead"
        )
    family, values = FAMILIES[text.model_type], text.to_dict()
    H, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    width = values.get("head_dim") or H // heads
    kv_heads = values["num_key_value_heads"]
    biased = bool(values.get("attention_bias"))
    attention = 2 * heads * width * H + 2 * kv_heads * width * H
    attention += (heads + 2 * kv_heads) * width * (biased or family.bias) + H * biased
    attention += 2 * width * family.head_norms + heads * family.sinks + family.norms * H
    experts = values.get("num_local_experts") or 0
    sparse = [i for i in range(layers) if experts and _is_sparse(values, i)]
    inner = values.get("moe_intermediate_size") or values["intermediate_size"]
    dense = 3 * H * values["intermediate_size"]
    if values.get("mlp_bias"):
        dense += 2 * values["intermediate_size"] + H
    head = values["vocab_size"] * H
    own_head = head_rows is not None and head_rows < values["vocab_size"]
    return ModelShape(
        fixed=layers * attention
        + (layers - len(sparse)) * dense
        + len(sparse) * experts * (H + family.expert_bias)  # routers
        + H
        + (head_rows * H if own_head else head),
        table=0 if values["tie_word_embeddings"] and not own_head else head,
        expert=3 * H * inner + (2 * inner + H) * family.expert_bias if sparse else 0,
        experts=experts,
        topk=values["num_experts_per_tok"] if experts else 0,
        moe_layers=len(sparse),
        kv=tuple((2 * kv_heads * width, window) for window in _windows(values, layers)),
    )


def _is_sparse(values: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture-of-experts model has experts (Qwen leaves some dense)."""
    return layer not in (values.get("mlp_only_layers") or ()) and not (layer + 1) % values.get("decoder_sparse_step", 1)


def _windows(values: Mapping[str, Any], layers: int) -> list[int | None]:
    window = values.get("sliding_window")
    kinds = values.get("layer_types") or ["full_attention" if window is None else "sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def eagle3_shapes(config: Eagle3Config) -> tuple[ModelShape, ModelShape]:
    """(a drafting step, the commit pass) of an EAGLE-3 draft: its layers and head rows; the pass fuses features too."""
    H, width = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    qkv, layers = H * (heads + 2 * kv_heads) * width, config.num_hidden_layers
    layer = qkv + heads * width * H + 3 * H * config.intermediate_size + 2 * H
    first = qkv + H  # What the first layer has more: a second input and its norm.
    step = layers * layer + first + H + config.draft_vocab_size * H
    kv = ((2 * kv_heads * width, config.sliding_window),) * layers
    fuse = (H + config.fc_norm + config.norm_before_fc) * len(config.feature_layers) * config.target_hidden_size
    return ModelShape(step, kv=kv), ModelShape(step + fuse, kv=kv)


DraftShape = Eagle3Config | PretrainedConfig | ModelShape | None
"""What drafts: an EAGLE-3 module, a small model (its config, or its shape), or nothing that costs (lookup)."""


@dataclass(frozen=True)
class Roofline:
    """A device and how models lie on it: bytes of a weight and of a cached value, seconds a forward costs at least.

    layer_overhead: seconds that each layer takes besides, however few its bytes (kernels start one after another).
    Beside a large target nothing; for small drafts it is what makes depth dearer than width (arXiv 2402.01528).
    """

    device: Device
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    overhead: float = 0.0
    layer_overhead: float = 0.0

    def seconds(self, shape: ModelShape, n: float, batch: int = 1, context: float = 0.0) -> float:
        """A forward over n tokens of each of `batch` rows, behind `context` cached ones."""
        moved = shape.read(n * batch) * self.weight_bytes + batch * shape.cached(context) * self.kv_bytes
        computed = 2 * shape.active * n * batch
        least = self.overhead + len(shape.kv) * self.layer_overhead
        return max(moved / self.device.bandwidth, computed / self.device.flops) + least

    def draft_line(
        self, draft: DraftShape, acceptance: Sequence[float], batch: int, context: float
    ) -> tuple[float, float]:
        """(a, b) seconds: a round of K drafts takes a + b K, from the joint rates of the last round.

        None drafts for nothing (lookup). A small model runs K times, the first time over the last token and, where all
        drafts stood, the last of them too. EAGLE-3 commits the accepted tokens in one pass, which gives the first
        draft, and steps K - 1 times.
        """
        if draft is None:
            return 0.0, 0.0
        if isinstance(draft, Eagle3Config):
            (each, commit), tokens = eagle3_shapes(draft), tau_at(acceptance, len(acceptance))
        else:
            each = draft if isinstance(draft, ModelShape) else shape_of(draft)
            commit, tokens = each, 1 + acceptance[-1]
        step = self.seconds(each, 1, batch, context)
        return self.seconds(commit, tokens, batch, context) - step, step

    def model(
        self,
        target: PretrainedConfig,
        draft: DraftShape,
        acceptance: Sequence[float],
        concurrency: int = 1,
        context: float = 1024,
    ) -> CostModel:
        """The cost model of a draft with these joint rates per position, at one concurrency."""
        shape, deepest = shape_of(target), len(acceptance)
        widths = range(1, deepest + 2)
        plain = self.seconds(shape, 1, concurrency, context)
        a, b = self.draft_line(draft, acceptance, concurrency, context)
        verify = {float(n): self.seconds(shape, n, concurrency, context) / plain for n in widths}
        return CostModel({deepest: acceptance}, (a / plain, b / plain), verify, concurrency=concurrency)


def predict(
    roofline: Roofline,
    target: PretrainedConfig,
    draft: Eagle3Config | PretrainedConfig | None,
    acceptance: Sequence[float],
    *,
    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    context: float = 1024,
) -> dict[str, Any]:
    """{"device", "target_step": [seconds], "best": [{"concurrency", "k", "tau", "speedup", "c", "v", "o"}],
    "break_even": concurrency | None}: the best K in 1..len(acceptance) for each concurrency.

    acceptance: joint rates per position, taken to hold for every K; context: cached tokens of a row.
    """
    ks = range(1, len(acceptance) + 1)
    best = []
    for rows in concurrency:
        model = roofline.model(target, draft, acceptance, rows, context)
        best.append({"concurrency": rows, **model.best(ks)})
    shape = shape_of(target)
    return {
        "device": roofline.device.name,
        "target_step": [roofline.seconds(shape, 1, rows, context) for rows in concurrency],
        "best": best,
        "break_even": break_even({row["concurrency"]: row["speedup"] for row in best}),
    }
