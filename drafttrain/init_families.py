"""What `drafttrain init` knows about families beyond their config: small siblings of the same vocabulary, switches of
their chat templates, and which engines serve drafts for them.
"""

import copy
from dataclasses import dataclass

from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafttrain.drafts.fresh_student import LAYER_LISTS, spread
from drafttrain.export.check_engines import LLAMA_CPP_HOOKLESS, SGLANG_HOOKS
from drafttrain.export.gguf import FAMILIES as GGUF_FAMILIES
from drafttrain.export.serve import lacks_hooks
from drafttrain.init_facts import Facts, InitError
from drafttrain.plan_target import ModelOutline, outline_model
from drafttrain.target import find_decoder
from drafttrain.target_bare import bare_model


@dataclass(frozen=True)
class Student:
    """A small model that a recipe distils: its name, all its parameters, and how it is laid out."""

    name: str
    parameters: int
    outline: ModelOutline


@dataclass(frozen=True)
class Sibling:
    """A published small model, its input table its head too. kinds: text models whose tokenizer it has, its own type
    first; vocabularies: theirs; heads: (queries, keys, channels of each). All numbers are those of its config.
    """

    name: str
    kinds: tuple[str, ...]
    vocabularies: tuple[int, ...]
    layers: int
    width: int
    inner: int
    heads: tuple[int, int, int]
    parameters: int

    def student(self) -> Student:
        """Laid out without memory."""
        heads, kv_heads, head_dim = self.heads
        config = AutoConfig.for_model(
            self.kinds[0],
            vocab_size=self.vocabularies[0],
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            tie_word_embeddings=True,
        )
        return Student(self.name, self.parameters, outline_model(config))


SIBLINGS = (
    Sibling("meta-llama/Llama-3.2-1B-Instruct", ("llama",), (128256,), 16, 2048, 8192, (32, 8, 64), 1_235_814_400),
    Sibling("Qwen/Qwen2.5-0.5B-Instruct", ("qwen2",), (151936, 152064), 24, 896, 4864, (14, 2, 64), 494_032_768),
    Sibling("Qwen/Qwen3-0.6B", ("qwen3", "qwen3_moe"), (151936,), 28, 1024, 3072, (16, 8, 128), 596_049_920),
    Sibling("google/gemma-3-270m-it", ("gemma3_text",), (262144, 262208), 18, 640, 2048, (4, 1, 256), 268_098_176),
)
"""The small model of a family, by its text models and the vocabulary sizes, padding included, that its larger ones
have. Whether the tokenizers are one is checked when data is prepared.
"""
MUCH_SMALLER = 4

THINKING = {
    "qwen3": ("enable_thinking", True),
    "qwen3_moe": ("enable_thinking", True),
    "smollm3": ("enable_thinking", True),
    "gpt_oss": ("reasoning_effort", "medium"),
}
"""The switch of the family's chat template and its own default, as published."""

VLLM_HOOKS = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "phi3", "llama4"),
    *("llama4_text", "olmo2", "olmo3", "granite", "smollm3", "gemma4", "gemma4_text"),
)
"""model_type of targets whose own vLLM model has EAGLE-3 hooks (0.32); others may."""
LLAMA_CPP_HOOKS = ("llama", "qwen3", "qwen3_moe", "gemma4", "gemma4_text", "gpt_oss")


def find_sibling(facts: Facts) -> Sibling | None:
    """The family's small model, where the target is at least four times as large as a token sees it."""
    for sibling in SIBLINGS:
        fits = facts.kind in sibling.kinds and facts.vocab in sibling.vocabularies
        if fits and facts.active >= MUCH_SMALLER * sibling.parameters:
            return sibling
    return None


def check_prunable(facts: Facts, count: int) -> None:
    """InitError where a model of `count` of its layers could not be built again from a config."""
    known = f"and no small model of its vocabulary is known here. Mend: --sibling ID, of the same {facts.vocab:,} words"
    if type(facts.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InitError(f"{facts.name}: its language model has no class of its own to prune, {known}")
    config, kept = copy.deepcopy(facts.config), spread(facts.layers, count)
    for name, values in config.to_dict().items():
        if name in LAYER_LISTS and values is not None:
            setattr(config, name, [values[i] for i in kept])
    config.num_hidden_layers = count
    whole, small = (find_decoder(bare_model(one))[0].get_submodule("layers") for one in (facts.config, config))
    if any(_makes(whole[i]) != _makes(small[new]) for new, i in enumerate(kept)):
        raise InitError(f"{facts.name}: its layers are of several makes, so none can be left out, {known}")


def _makes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def engine_words(facts: Facts, method: str) -> list[str]:
    """Sentences about each engine that serves the method, for this family."""
    if method == "medusa":
        words = ["Engines: vLLM; TensorRT-LLM reads another layout, of the whole vocabulary, without a tree."]
        return [*words, "SGLang, llama.cpp and transformers serve no Medusa heads."]
    if method == "kd":
        known = facts.kind in GGUF_FAMILIES
        gguf = "llama.cpp (a GGUF is written)" if known else "llama.cpp with its own converter, where it knows them"
        return [f"Engines: vLLM, SGLang, transformers (one request at a time), {gguf}."]
    kind = facts.family
    if lacks_hooks(method, kind):
        vllm = "vLLM with --model-impl transformers, as its own model of the family has no EAGLE-3 hooks"
    elif kind in VLLM_HOOKS:
        vllm = "vLLM"
    else:
        vllm = "vLLM, with --model-impl transformers unless its own model of the family has EAGLE-3 hooks"
    sglang = "SGLang" if kind in SGLANG_HOOKS else "not SGLang 0.5.23, whose model of the family captures no features"
    if kind in LLAMA_CPP_HOOKLESS:
        cpp = "not llama.cpp, which has no EAGLE-3 for the family"
    else:
        cpp = "llama.cpp" if kind in LLAMA_CPP_HOOKS else "llama.cpp unconfirmed"
    return [f"Engines: {vllm}; {sglang}; {cpp}; TensorRT-LLM unconfirmed for the family."]
