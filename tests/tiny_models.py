"""Tiny random models of the families that are targets, a word-level tokenizer for them, and folders that hold both.

Weights are drawn larger than transformers does, so that a fault in a norm, mask or scale shows."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

N, V = 8, 99
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "Mistral": {"sliding_window": 4},
    "Phi3": {"sliding_window": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_parameters": None},
    "Gemma2": {"sliding_window": 4, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Cohere2": {"sliding_window": 4, "logit_scale": 0.25},
    "Granite": {"logits_scaling": 8.0},
}


def make_model(family: str, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config_class = getattr(transformers, f"{family}{text}Config")
    values = {**SIZES, **FAMILIES[family], **changes}
    config = config_class(**{key: value for key, value in values.items() if value is not None})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_tokenizer(words: int = 90, specials=("<pad>", "<bos>", "<eos>", "<|im_end|>")) -> PreTrainedTokenizerFast:
    vocabulary = [*specials, "<unk>", *(f"w{i}" for i in range(words))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    inner.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def save(folder: Path, model, tokenizer=None, **options) -> Path:
    model.save_pretrained(folder, **options)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def tokens(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(1))
