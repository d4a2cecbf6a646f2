"""What each engine does with each feature and each fault of a draft: the one table that `drafttrain check` reads.

Read, not run: vLLM 0.32 (Eagle3LlamaForCausalLM, Medusa, SpeculativeConfig), SGLang 0.5.23 (LlamaForCausalLMEagle3),
TensorRT-LLM's PyTorch backend of 2026 (Eagle3ForCausalLM), llama.cpp's converter of 2026, transformers 5 (assisted
generation). `make engines` runs good exports in a real vLLM.
"""

from collections.abc import Mapping

ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers")
EVERY = "*"
"""In a row of the table: every engine that the row does not name."""

Row = Mapping[str, str | None]

POSITIONS: Row = {
    EVERY: "turns positions past the cap by wrong angles, or stops drafting there: long prompts lose all speed",
    "vllm": "widens the rotary table, but keeps the cap as the draft's max_model_len: beyond it nothing is drafted",
}

ANY: dict[str, Row] = {
    "not-finite": {EVERY: "loads the numbers as they are and drafts noise"},
    "all-zero": {EVERY: "loads the zeros: the draft says the same whatever it reads"},
    "dtype-mixed": {EVERY: "casts all tensors to one dtype without a word: other numbers than were evaluated"},
    "dtype-config": {
        EVERY: "casts what is stored without a word",
        "tensorrt-llm": "builds the draft in the config's dtype and casts what is stored",
    },
    "quantization": {EVERY: "takes the weights for quantised ones: they fail to load, or are read as other numbers"},
    "missing-tensor": {
        EVERY: "serves whatever lies in memory there: missing names are no error",
        "tensorrt-llm": "stops while loading",
        "llama.cpp": "stops while loading",
    },
    "shape": {EVERY: "stops while loading"},
    "tokenizer": {EVERY: "reads its token ids as other words: acceptance near 0"},
    "tuned-target": {EVERY: "serves heads on states they were not trained on"},
}
"""Faults that any kind of draft can have."""

EAGLE3: dict[str, Row] = {
    # Features that a sound draft may have. An engine that a row leaves out serves it as trained.
    "norm_before_residual": {
        "sglang": "ignores the flag: the residual is the un-normed state",
        "tensorrt-llm": "ignores the flag: the residual is the un-normed state",
    },
    "norm_before_fc": {"llama.cpp": "converts no input_norm.weight"},
    "fc_norm": {"llama.cpp": "has no norms before fc: features go in un-normed, or their tensors stop the converter"},
    "norm_output": {"llama.cpp": "ignores the flag: each step is fed the un-normed state"},
    "qk_norm": {
        "vllm": "builds them for model_type qwen3 alone; for llama their names stop it",
        "sglang": "skips the tensors: queries and keys go un-normed",
        "tensorrt-llm": "skips the tensors: queries and keys go un-normed",
        "llama.cpp": "has none in the eagle3 architecture",
    },
    "attention_bias": {
        "sglang": "builds q, k and v without biases and skips theirs",
        "llama.cpp": "has none in the eagle3 architecture",
    },
    "mlp_bias": {
        "sglang": "builds the MLP without biases and skips theirs",
        "llama.cpp": "has none in the eagle3 architecture",
    },
    "fc_bias": {"vllm": "builds fc without a bias; the tensor's name stops it", "llama.cpp": "adds no bias behind fc"},
    "several_layers": {
        "sglang": "norms the input of the later layers with hidden_norm, the file has input_layernorm: random there",
        "tensorrt-llm": "looks for them as midlayer.1 .. with a hidden_norm each",
        "llama.cpp": "takes a draft of more than one layer for a plain llama",
    },
    "sliding_window": {
        "sglang": "attends to everything unless started with --speculative-draft-window-size",
        "tensorrt-llm": "attends to everything",
        "llama.cpp": "attends to everything",
    },
    "own_embeddings": {
        "sglang": "overwrites the draft's own table with the target's",
        "tensorrt-llm": "reads the target's table, not the draft's own",
    },
    "aux_count": {"llama.cpp": "reads exactly three features"},
    "speculators_layout": {
        "sglang": "cannot read the config: it has no model_type and no eagle_config",
        "tensorrt-llm": "cannot read the config: its settings are nested",
    },
    # Faults.
    "missing-head": {
        EVERY: "takes the target's head, whose rows are other words than the draft's",
        "sglang": "serves a random head",
    },
    "unknown-tensor": {
        EVERY: "skips the tensor without a word",
        "vllm": "stops: it has no such parameter",
        "llama.cpp": "stops: it cannot map the name",
    },
    "unused-tensor": {EVERY: "drops the tensor without a word, as the config does not announce it"},
    "name-prefix": {
        EVERY: "stops while loading",
        "vllm": "stops: it puts model. before every name itself",
        "tensorrt-llm": "stops: it puts model. before every name itself",
        "sglang": None,
    },
    "feature-scales": {
        EVERY: "skips the scales: every feature goes into fc undivided",
        "vllm": "stops: it has no such parameter",
        "llama.cpp": "stops: it cannot map the name",
    },
    "missing-embeddings": {
        EVERY: "has no table of the draft's width",
        "vllm": "keeps its own table of that width, which nothing fills",
        "sglang": "keeps its own table of that width, which nothing fills",
    },
    "missing-d2t": {
        EVERY: "takes draft word i for the target's word i: acceptance near 0",
        "vllm": "reads a map of zeros: the first ids of the vocabulary, acceptance near 0",
    },
    "unexpected-d2t": {
        EVERY: "applies the map",
        "vllm": "stops: a draft of the whole vocabulary has no map",
        "tensorrt-llm": "skips the map",
    },
    "d2t-shape": {EVERY: "stops, or maps only some of the words"},
    "d2t-dtype": {EVERY: "casts the map to whole numbers"},
    "d2t-zero": {EVERY: "drafts the first ids of the vocabulary, whatever they mean: acceptance near 0"},
    "d2t-absolute-ids": {EVERY: "adds the row's number to ids that are the target's already: wrong words"},
    "d2t-out-of-range": {EVERY: "indexes past the vocabulary", "llama.cpp": "stops: the id is out of range"},
    "d2t-colliding": {
        EVERY: "gives one word to several rows, of which one counts",
        "llama.cpp": "stops: two rows have one id",
    },
    "d2t-unsorted": {EVERY: "maps rows to ids out of order: right only if the head's rows were permuted with them"},
    "t2d-disagrees": {EVERY: "reads d2t alone and never notices that the file's two maps name other words"},
    "vocab-size": {
        EVERY: "sizes embeddings and logits by it",
        "vllm": "scatters the logits into so many columns: an assertion, or shapes that part deep in the sampler",
    },
    "draft-vocab-size": {EVERY: "takes the whole vocabulary for the draft's, and the head's rows do not fit"},
    "target-hidden-size": {EVERY: "sizes fc by the draft's own width"},
    "layer-ids-missing": {
        EVERY: "captures its defaults, hs[2], hs[n//2] and hs[n-3], whatever the draft was trained on"
    },
    "layer-ids-nested-only": {
        "vllm": "takes the nested list as hs[k]: every feature one layer too early",
    },
    "layer-ids-top-only": {
        "sglang": "reads the nested list alone and captures its defaults",
        "tensorrt-llm": "reads the nested list alone and captures its defaults",
    },
    "layer-ids-disagree": {EVERY: "reads one of the two lists; the draft was trained on one of them"},
    "layer-ids-unsorted": {EVERY: "captures in rising order: fc's columns meet other features"},
    "layer-ids-duplicate": {EVERY: "captures each layer once: fewer features than fc has columns for"},
    "layer-ids-range": {EVERY: "captures nothing there: fewer features than fc has columns for"},
    "num-aux": {
        "vllm": "sizes fc by num_aux_hidden_states, else the nested list, else 3",
        "sglang": "sizes fc by num_aux_hidden_states, else the nested list, else 3",
    },
    "aux-off": {EVERY: "feeds the last hidden state alone, which fc was not trained on", "llama.cpp": None},
    "norm-before-fc-nested": {
        "tensorrt-llm": "reads the flag in eagle_config alone",
        "vllm": "lets eagle_config's flag win over the top-level one",
        "sglang": "lets eagle_config's flag win over the top-level one",
    },
    "norm-before-residual-unsaid": {"vllm": "assumes true, speculators itself false"},
    "positions": POSITIONS,
    "rope-theta": {EVERY: "turns positions at another base than the target's"},
    "rope-scaling": {EVERY: "scales positions otherwise than the target: far prompts lose all speed"},
    "eps": {EVERY: "norms with it: other states than the target's own norms would give"},
    "tied-embeddings": {
        EVERY: "reads the embedding table as the head, or the next release does",
        "vllm": "unties them as long as the file has a head (0.32); what it was trained with is not said",
        "sglang": "serves the embedding table as the head",
    },
    "architectures": {
        EVERY: "knows no such draft",
        "sglang": "loads a plain causal language model: no name fits, all weights are random",
    },
    "model-type": {
        "vllm": "cannot tell which class reads the config",
        "sglang": "cannot tell which class reads the config",
    },
    "hidden-act": {EVERY: "stops: only silu is built"},
}
"""Of EAGLE-3: features (names with _) and faults (names with -)."""

MEDUSA: dict[str, Row] = {
    "sequential": {EVERY: "serves no heads that read drafted tokens"},
    "engine_layout": {"tensorrt-llm": "reads medusa_lm_head.safetensors and medusa_num_heads"},
    "medusa-fc-bias": {"vllm": "builds the layers without biases and drops theirs: acceptance near 0"},
    "missing-bias": {"vllm": "stops: it wants a bias for every layer", "tensorrt-llm": "stops while loading"},
    "missing-head": {
        "vllm": "serves whatever lies in memory as vocabulary matrix: its check of missing names passes heads over",
        "tensorrt-llm": "stops while loading",
    },
    "missing-tensor": {EVERY: "stops while loading"},
    "unknown-tensor": {EVERY: "skips the tensor without a word"},
    "input-scales": {EVERY: "skips the scales: every channel goes in undivided"},
    "head-count-keys": {
        "vllm": "takes any key with num and heads, or layers, for theirs; the last one wins",
        "tensorrt-llm": None,
    },
    "num-heads": {"vllm": "stops: it builds more heads than the file has", "tensorrt-llm": "stops while loading"},
    "heads-unused": {"vllm": "builds the first heads alone", "tensorrt-llm": "builds the first heads alone"},
    "vocab-size": {
        "vllm": "puts the target's size in its place, and that of the draft vocabulary too: a token_map is dropped",
        "tensorrt-llm": "sizes the heads by it",
    },
    "token-map-missing": {"vllm": "stops: a smaller vocabulary wants a map"},
    "token-map-unused": {"vllm": "drops the map: row i counts as the target's word i"},
    "token-map-shape": {"vllm": "stops, or maps only some of the words"},
    "token-map-offsets": {"vllm": "reads offsets as target ids: wrong words"},
    "token-map-out-of-range": {"vllm": "indexes past the vocabulary"},
    "token-map-colliding": {"vllm": "gives one word to several rows, of which one counts"},
    "token-map-unsorted": {"vllm": "maps rows to ids out of order: right only if the head's rows were permuted too"},
    "token-map-shifted": {"vllm": "takes each row for its neighbour's word: acceptance near 0"},
    "token-map-own-heads": {"vllm": "sizes heads of their own by the whole vocabulary: shapes part"},
    "hidden-size": {EVERY: "feeds states of the target's width: shapes part at the first token"},
    "architectures": {"vllm": "knows no such draft", "tensorrt-llm": None},
    "tied-embeddings": {EVERY: "may read the target's table as the heads'"},
}
"""Of Medusa heads."""

SMALL: dict[str, Row] = {
    "missing-head": {
        EVERY: "serves a random head",
        "llama.cpp": "takes the embedding table for it",
        "transformers": "draws one at random with a warning",
    },
    "missing-tensor": {
        EVERY: "stops, or serves whatever lies in memory there",
        "transformers": "draws the tensor at random with a warning",
    },
    "unknown-tensor": {EVERY: "skips the tensor, or stops"},
    "tied-head-differs": {
        EVERY: "reads the embedding table as the head and drops the file's",
        "vllm": None,
        "transformers": None,
    },
    "vocab-size": {
        EVERY: "stops, or reads ids past the draft's table",
        "vllm": "stops: both models must have one vocabulary size",
        "transformers": "takes the two for different tokenizers and re-tokenises every draft, or stops",
        "llama.cpp": "stops where the sizes are more than 128 apart",
    },
    "positions": POSITIONS,
    "embedding-rows": {EVERY: "stops while loading"},
    "architectures": {EVERY: "builds another model, or none"},
    "generation-config": {
        "transformers": "drafts 20 tokens a round and stops early below a confidence of 0.4: another acceptance"
    },
    "layer-pattern": {"llama.cpp": "gives full attention to every nth layer of this family, whatever the config says"},
}
"""Of small drafts."""

TABLE = {
    "eagle3": ANY | EAGLE3,
    "medusa": ANY | MEDUSA,
    "kd": ANY | SMALL,
}
"""By method, feature or fault and engine: what the engine does otherwise than the draft was trained. None, or an engine
that neither the row nor EVERY names: it serves the draft as trained.
"""

REFUSED = {"speculators_layout", "engine_layout", "sequential"}
"""Rows that make a draft UNSUPPORTED by an engine, not wrong."""

LLAMA_LIKE = ("llama", "mistral", "ministral3", "internlm3", "phi3")
SGLANG_HOOKS = (
    *LLAMA_LIKE,
    *("apertus", "bailing_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "exaone_moe", "gemma3", "gemma3_text"),
    *("gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k25", "llama4", "llama4_text"),
    *("longcat_flash", "minimax_m2", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"),
)
"""model_type of targets whose SGLang model has set_eagle3_layers_to_capture, itself or from its base (0.5.23)."""
LLAMA_CPP_HOOKLESS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen2")
"""model_type of targets without EAGLE-3 in llama.cpp; llama, qwen3 (+moe, next), gemma3n, gemma4 and gpt-oss have."""


def consequence(method: str, code: str, engine: str) -> str | None:
    """What the engine does with a draft of that method with that feature or fault; None: nothing amiss."""
    row = TABLE[method][code]
    return row[engine] if engine in row else row.get(EVERY)
