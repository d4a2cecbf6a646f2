"""Low-rank adapters on a student's linear layers (LoRA, arXiv 2106.09685, through peft), and merging them into a
plain model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.drafts.base import DraftError
from drafttrain.drafts.small_model import sharing_copy
from drafttrain.drafts.student_parts import body_names, check_plain, renew
from drafttrain.recipe import LoraConfig
from drafttrain.target import find_decoder


def add_adapters(model: PreTrainedModel, settings: LoraConfig, seed: int = 0) -> PreTrainedModel:
    """In place: fp32 adapters, which train, beside linear layers of the decoder; the rest keeps its requires_grad.

    The first logits are the model's own (B is zero). DraftError for modules that the model does not have.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    chosen = chosen_linears(model, settings.target_modules)
    config = PeftConfig(
        r=settings.r, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=chosen, bias="none"
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
        parameter.requires_grad_(".lora_" in name or name in trained)
    return model


def chosen_linears(model: PreTrainedModel, wanted: Sequence[str] | None) -> list[str]:
    """Full names of the linear layers within the decoder layers that are called so; all of them for None."""
    decoder, _ = find_decoder(model)
    inside = set(decoder.layers.modules())
    names = [name for name, module in model.named_modules() if module in inside and isinstance(module, nn.Linear)]
    if wanted is None:
        return names
    chosen = {want: [name for name in names if f".{name}".endswith(f".{want}")] for want in wanted}
    absent = [want for want, found in chosen.items() if not found]
    if absent:
        leaves = sorted({name.rpartition(".")[2] for name in names})
        raise DraftError(
            f"draft.lora.target_modules names {', '.join(absent)}; the decoder layers of {type(model).__name__} have "
            f"no linear layer of that name. Expected some of {', '.join(leaves)}. Mend: correct the names, or leave "
            "target_modules out to adapt all of them."
        )
    return [name for name in names if any(name in found for found in chosen.values())]


@torch.no_grad()
def merged(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A frozen plain model of the same class with the adapters merged, in fp32; `model` stays as it is.

    dtype: what everything is cast to afterwards; what has it already is shared with `model`, not copied. None: fp32
    layers, embedding and head as they are. Without adapters and dtype: the model itself. DraftError for quantised
    weights.
    """
    from peft.tuners.lora import LoraLayer

    if dtype is None and not any(isinstance(module, LoraLayer) for module in model.modules()):
        return model
    plain = sharing_copy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, LoraLayer):
            plain.set_submodule(name, _merged_layer(module))
    vars(plain).pop("peft_config", None)
    body = body_names(plain)

    def make(name: str, tensor: Tensor) -> nn.Parameter:
        check_plain(name, tensor)
        wanted = dtype or (torch.float32 if name in body else tensor.dtype)
        return nn.Parameter(tensor.to(wanted), requires_grad=False)

    renew(plain, make)
    return plain.eval()


def _merged_layer(adapted: nn.Module) -> nn.Module:
    """The plain linear layer with fp32 weight W + scale * B A."""
    linear = adapted.get_base_layer()
    check_plain("an adapted layer", linear.weight.detach())
    delta = sum(adapted.get_delta_weight(name).float() for name in adapted.active_adapters)
    linear.weight = nn.Parameter(linear.weight.detach().float() + delta, requires_grad=False)
    return linear
