"""The parts of a student: which of its tensors train, text alone without vision towers, and a forward that takes
tables and layers of different dtypes.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafttrain.drafts.base import DraftError
from drafttrain.target import find_decoder

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run_student(student: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Backbone alone: input_ids int64 [B, T], padded on the right -> hidden states behind the final norm [B, T, H].

    A frozen embedding in bf16 under fp32 layers works here, with autocast and without: its output (scaled by the
    family's own factor) is cast to the layers' dtype before the first layer, which also keeps rotary tables in fp32.
    """
    decoder, _ = find_decoder(student)
    embedding, dtype = student.get_input_embeddings(), next(decoder.layers.parameters()).dtype
    if embedding.weight.dtype == dtype:
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    return decoder(inputs_embeds=embedding(input_ids).to(dtype), use_cache=False).last_hidden_state


def causal_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's own class, or the text model's class of a multimodal wrapper; DraftError where there is none."""
    config = model.config.get_text_config(decoder=True)
    if config is model.config:
        return type(model)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise DraftError(
            f"{type(model).__name__} wraps a {type(config).__name__}, of which there is no text model by itself. "
            "Mend: a sibling as the student (draft.init_from)."
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or of a multimodal wrapper a text model around its very modules."""
    kind = causal_class(model)
    if kind is type(model):
        return model
    decoder, _ = find_decoder(model)
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    # The wrapper's own entry may say otherwise than its text config.
    config.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.device("meta"):
        text = kind(config)
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(model.get_output_embeddings())
    text.generation_config = copy.deepcopy(model.generation_config)
    assert not any(tensor.is_meta for tensor in [*text.parameters(), *text.buffers()])
    return text.eval()


def check_rebuildable(model: PreTrainedModel) -> None:
    """DraftError unless the model's config alone describes its layers, so that what is saved loads again."""
    with torch.device("meta"):
        rebuilt = type(model)(copy.deepcopy(model.config))
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = {name: tuple(tensor.shape) for name, tensor in rebuilt.state_dict().items()}
    odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if odd:
        raise DraftError(
            f"the layers of {type(model).__name__} are of several makes, and a config of the kept ones cannot say "
            f"which is which ({odd[0]}). Expected layers that can stand in each other's place. Mend: other layers in "
            "draft.keep_layers, or a sibling or a fresh model as the student."
        )


def table_names(model: PreTrainedModel) -> set[str]:
    """Names of the embedding's and the head's parameters."""
    return _names_below(model, {model.get_input_embeddings(), model.get_output_embeddings()})


def body_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of the decoder layers and the final norm."""
    decoder, norm = find_decoder(model)
    return _names_below(model, {decoder.layers, norm})


def _names_below(model: nn.Module, chosen: set[nn.Module]) -> set[str]:
    return {
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if module in chosen
        for leaf, _ in module.named_parameters()
    }


def check_plain(name: str, tensor: Tensor) -> None:
    """DraftError for a quantised weight: codes, whose cast to another dtype would be no weight."""
    if tensor.dtype not in PLAIN_DTYPES or type(tensor) is not Tensor:
        raise DraftError(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')} ({type(tensor).__name__}), a quantised "
            "weight. Expected bfloat16, float16 or float32. Mend: the unquantised checkpoint (--quantize measures "
            "small models with int8 and int4 weights), or another student."
        )


def renew(model: PreTrainedModel, make: Callable[[str, Tensor], nn.Parameter]) -> None:
    """Replace every parameter in place by make(name, tensor); one that stands at two places is made once and stays
    shared. Models that held the old parameters keep them.
    """
    old = list(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, parameter in old:
        if id(parameter) not in made:
            made[id(parameter)] = make(name, parameter.detach())
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, made[id(parameter)])


def set_trained(model: PreTrainedModel, names: set[str]) -> PreTrainedModel:
    """In place: the named parameters become fp32 copies that train, all others frozen ones around the same tensors."""

    def make(name: str, tensor: Tensor) -> nn.Parameter:
        if name not in names:
            return nn.Parameter(tensor, requires_grad=False)
        check_plain(name, tensor)
        return nn.Parameter(tensor.to(torch.float32, copy=True))

    renew(model, make)
    return model
