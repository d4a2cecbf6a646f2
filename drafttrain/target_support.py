"""Which of transformers' architectures can be targets, told from the config alone, and why the others cannot."""

from transformers import PretrainedConfig

from drafttrain.target_files import TargetError

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
KNOWN = "full, sliding or chunked attention"
STATE = "keeps a running state in place of keys and values, which cannot be rolled back when drafts are refused"
STATEFUL = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
)
"""model_type of state-space, linear-attention and convolution models, and of hybrids with layers of these kinds."""
MAYBE = "granitemoehybrid"
"""Some of Granite 4 have attention layers alone."""
KINDS = {
    "linear_attention": STATE,
    "conv": STATE,
    "hybrid": STATE,
    "hybrid_sliding": STATE,
    "indexed_attention": "picks the keys it reads by an indexer with a cache of its own, which ours does not hold",
}
"""Of layers that are not of ATTENTION, why they cannot be."""
ELSE = {
    "gemma3n_text": "carries several streams through its layers (AltUp), so that there is no one hs[k]",
    "longcat_flash": "has two attention blocks in a layer, and hs[k] counts layers",
    "mllama_text_model": "reads images through cross-attention layers, which have no place among hs[k]",
    "olmo": "has norms without weights, whose epsilon config.json does not say; OLMo 2 and 3 work",
}
"""model_type of the text model: what stands against it otherwise."""


def unsupported(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot be a target, as the rest of a sentence about it; None: nothing is known against
    it. A wrapper with a vision tower is judged by its language model.
    """
    if config.is_encoder_decoder:
        return "is an encoder-decoder; a target is a decoder"
    text = config.get_text_config(decoder=True)
    values, kind = text.to_dict(), text.model_type
    if "type_vocab_size" in values:
        return "is an encoder; a target is a decoder that predicts the next token"
    if kind in STATEFUL and not (kind == MAYBE and _attention_alone(values)):
        return STATE
    if kind in ELSE:
        return ELSE[kind]
    for layer in sorted(set(values.get("layer_types") or ()) - set(ATTENTION)):
        why = KINDS.get(layer, f"is of a kind that our masks do not know; expected {KNOWN}")
        return f"has layers of type {layer}: such a layer {why}"
    return None


def _attention_alone(values: dict) -> bool:
    """Whether a config has attention layers and no others."""
    kinds = set(values.get("layer_types") or ())
    return bool(kinds) and kinds <= set(ATTENTION)


def check_supported(config: PretrainedConfig, name: str) -> None:
    """TargetError for a config that `unsupported` speaks against."""
    why = unsupported(config)
    if why is not None:
        kind = config.get_text_config(decoder=True).model_type
        raise TargetError(f"{name} ({kind}) {why}. Mend: choose another target.")
