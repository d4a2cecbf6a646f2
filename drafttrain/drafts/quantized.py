"""Small models with int8 or int4 weights, rounded to the nearest code (the baseline of arXiv 2210.17323). Activations
stay as they are; verification guards the output, so that only acceptance can suffer.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.small_model import sharing_copy
from drafttrain.target import Target

Kind = Literal["int8", "int4"]
WIDTHS = {"int8": 16, "int4": 32}
"""A layer's input width must be a multiple. int8: what torch's CPU kernel reads at once; int4: the group of a scale."""
LANES = 16
"""torch's int4 kernel takes multiples of so many rows."""
BLOCK = 8192
"""Rows packed at a time, so that a head of 262k rows is never in fp32. A multiple of 64, within which codes mix."""


class PackedWeight(torch.Tensor):
    """A weight [N, K] as integer codes, which F.linear multiplies by without unpacking them. It cannot be indexed.

    int8: codes int8 [N, K], scales [N]; w = code * scale. int4: codes uint8 [N up to the next 16, K/2] in the order of
    torch's CPU kernel, scales [K/32, N up to the next 16, 2] of (scale, zero); w = (code - 8) * scale + zero.
    """

    @staticmethod
    def __new__(cls, kind: Kind, shape: torch.Size, codes: Tensor, scales: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, kind: Kind, shape: torch.Size, codes: Tensor, scales: Tensor):
        self.kind, self.codes, self.scales = kind, codes, scales

    def __repr__(self) -> str:
        return f"PackedWeight({self.kind}, {tuple(self.shape)}, {self.dtype})"

    def linear(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """inputs [.., K] in the scales' dtype -> inputs @ w.T + bias [.., N]."""
        rows, columns = self.shape
        assert inputs.dtype == self.scales.dtype and inputs.shape[-1] == columns
        flat = inputs.reshape(-1, columns).contiguous()
        if self.kind == "int8":
            out = torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scales)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, WIDTHS["int4"], self.scales)
        out = out[:, :rows].reshape(*inputs.shape[:-1], rows)
        return out if bias is None else out + bias

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:  # What nn.Parameter and the heads of targets ask for.
            return cls(args[0].kind, args[0].shape, args[0].codes, args[0].scales)
        raise NotImplementedError(f"{func} of {args}: quantised weights can only be multiplied by (F.linear)")


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)


def pack(weight: Tensor, kind: Kind) -> PackedWeight:
    """The weight [N, K], K a multiple of WIDTHS[kind], rounded to the nearest codes, scales in its own dtype. CPU."""
    assert weight.shape[1] % WIDTHS[kind] == 0, "torch's kernel would read beyond the row"
    blocks = [(_int8 if kind == "int8" else _int4)(block) for block in weight.detach().split(BLOCK)]
    codes = torch.cat([codes for codes, _ in blocks])
    return PackedWeight(kind, weight.shape, codes, torch.cat([s for _, s in blocks], 0 if kind == "int8" else 1))


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127..127 with one scale a row."""
    values = weight.float()
    scales = (values.abs().amax(1) / 127).clamp_min(1e-12).to(weight.dtype)  # The rounding of a scale enters no weight.
    codes = (values / scales.float()[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """16 levels between the least and the greatest weight of each group of 32 columns."""
    rows, columns = weight.shape
    values = F.pad(weight.float(), (0, 0, 0, -rows % LANES)).view(-1, columns // WIDTHS["int4"], WIDTHS["int4"])
    low, high = values.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-6).to(weight.dtype).float()
    zero = (low + 8 * scale).to(weight.dtype).float()
    codes = ((values - zero) / scale + 8).round_().clamp_(0, 15).to(torch.int32).view(-1, columns)
    scales = torch.stack([scale[..., 0], zero[..., 0]], -1).transpose(0, 1).contiguous().to(weight.dtype)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), scales


def quantized(model: Target, kind: Kind) -> Target:
    """A copy of the model whose linear layers, head included, have int8 or int4 weights; the model stays as it is.

    All else is shared with it: norms, embeddings (a tied head is untied), experts kept as one tensor, and layers whose
    input width is no multiple of 16 (int8) or 32 (int4). A draft vocabulary is cut first (small_model.with_head_rows).

    On CPUs torch's own int8 and int4 kernels run. torchao's int8 weights, made for torch.compile, are unpacked anew in
    every eager step there, 5 times slower than bf16 for a head of 262k rows; bitsandbytes' int8 is slower than bf16
    too. On CUDA the weights are torchao's, of which int8 needs torch.compile to be fast in the same way.

    Raises DraftError for another kind or device, without torchao where it is needed, and when no layer fits.
    """
    if kind not in get_args(Kind):
        raise DraftError(f"the weights asked for are {kind!r}. Expected {' or '.join(get_args(Kind))}.")
    device = model.device.type
    if device not in ("cpu", "cuda"):
        raise DraftError(
            f"{kind} weights have no kernel on {device}. Expected a model on cpu or cuda. Mend: bf16 there."
        )
    small = sharing_copy(model.model)
    small.config.tie_word_embeddings = small.config.get_text_config(decoder=True).tie_word_embeddings = False
    layers = [layer for layer in small.modules() if isinstance(layer, nn.Linear)]
    layers = [layer for layer in layers if layer.in_features % WIDTHS[kind] == 0]
    if not layers:
        raise DraftError(
            f"{model.title} has no linear layer whose input width is a multiple of {WIDTHS[kind]}, as {kind} weights "
            "need. Mend: keep its weights as they are."
        )
    if device == "cuda":
        quantize_with_torchao(small, layers, kind)
    else:
        for layer in layers:
            layer.weight = nn.Parameter(pack(layer.weight, kind), requires_grad=False)
    return Target.from_model(small, model.tokenizer, f"{model.name}, {kind}")


def quantize_with_torchao(model: nn.Module, layers: list[nn.Linear], kind: Kind) -> None:
    """Give these layers of the model torchao's weight-only weights; int4 in the tiles of torch's CUDA kernel."""
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise DraftError(f"{kind} weights on CUDA need torchao. Mend: pip install 'drafttrain[quantize]'.") from error
    if kind == "int8":
        config = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = Int4WeightOnlyConfig(
            group_size=WIDTHS[kind], int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    quantize_(model, config, filter_fn=lambda module, name: any(module is layer for layer in layers))
