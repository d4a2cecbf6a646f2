"""The sections of a recipe: every typed setting with its default, its range and its meaning."""

import unicodedata
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int | float | str) else value


def _printable(value: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value):
        raise ValueError("expected text without line breaks and control characters")
    return value


def _switches(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in PASSED or not name.isidentifier():
            raise ValueError(f"found {name}, expected names of the chat template's own switches, as enable_thinking")
    return value


PASSED = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens", "bos_token", "eos_token"),
    *("raise_exception", "strftime_now"),
)
"""What is passed to a chat template or its renderer in any case, so that it is no switch."""
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
Counts = Annotated[list[Count], BeforeValidator(_listed), Field(min_length=1)]
Temperatures = Annotated[list[NonNegative], BeforeValidator(_listed), Field(min_length=1)]
Names = Annotated[list[Text], BeforeValidator(_listed)]
StorageDtype = Literal["bfloat16", "float16", "float32"]
LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "cross_entropy",
    "next_token",
    "neg_log_alpha",
    "lk_hybrid",
]
SplitName = Literal["train", "validation", "test"]


class Section(BaseModel):
    """Base of every group of settings: frozen, unknown keys forbidden, no infinities, no booleans as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("expected a value that is not true or false")
        return value


class TargetConfig(Section):
    """The frozen model that serves: a hub id, a folder, or a GGUF file. A bare string stands for `name_or_path`."""

    name_or_path: Text
    gguf_file: Text | None = None
    revision: Text | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Text = "auto"
    device_map: Text | None = None
    shard: bool = False
    attn_implementation: Text | None = None
    trust_remote_code: bool = False


class DataEntry(Section):
    """One source of conversations: a local `path` or a `datasets` hub id. `weight` < 1 subsamples, > 1 repeats."""

    path: Text | None = None
    dataset: Text | None = None
    name: Text | None = None
    split: Text = "train"
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "text", "tokens"] = "auto"
    weight: Positive = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> "DataEntry":
        if (self.path is None) == (self.dataset is None):
            found = "neither" if self.path is None else f"path {self.path!r} and dataset {self.dataset!r}"
            raise ValueError(f"found {found}, expected exactly one of path and dataset")
        return self


class RegenerateConfig(Section):
    """How the target answers the prompts itself before training; rows take the temperatures in turn.

    `server`: an OpenAI-compatible address (http://host:port/v1) that serves the target and answers in its place, as
    `model` (None: the one it serves, which must have the target's name), `concurrency` requests at a time. `endpoint`:
    completions is asked with token ids; chat with messages, for servers that take nothing else.
    """

    max_new_tokens: Count = 512
    temperature: Temperatures = [0.0]
    top_k: Natural = 0
    top_p: Share = 1.0
    batch_size: Count = 64
    seed: Natural = 0
    splits: Annotated[list[SplitName], BeforeValidator(_listed)] = ["train", "validation"]
    server: Text | None = None
    model: Text | None = None
    concurrency: Count = 32
    endpoint: Literal["completions", "chat"] = "completions"

    @model_validator(mode="after")
    def _of_one_kind(self) -> "RegenerateConfig":
        # With a server batch_size waits for the day without one: recipes have it, and the server comes by override.
        for name in ("model", "concurrency", "endpoint"):
            if self.server is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"found {name} {getattr(self, name)!r}, expected it beside server")
        return self


class DataConfig(Section):
    """Conversations, their lengths in tokens, and the draft vocabulary.

    `chat_template_kwargs`: switches of the target's chat template, such as {enable_thinking: false}; passed to it in
    training and evaluation alike.

    `draft_vocab` null keeps the target's whole vocabulary, the default of method kd.
    """

    train: Annotated[list[DataEntry], Field(min_length=1)]
    validation: list[DataEntry] = []
    test: list[DataEntry] = []
    max_length: Count = 2048
    chat: Literal["auto", "template", "none"] = "auto"
    chat_template_kwargs: Annotated[dict[str, JsonValue], AfterValidator(_switches)] = {}
    regenerate: RegenerateConfig | None = None
    draft_vocab: Count | None = 32000
    seed: Natural = 0

    @model_validator(mode="after")
    def _read_switches(self) -> "DataConfig":
        if self.chat_template_kwargs and self.chat == "none":
            found = f"chat_template_kwargs {self.chat_template_kwargs} with chat none"
            raise ValueError(f"found {found}, expected chat auto or template, or no chat_template_kwargs")
        return self


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of a small model or, for method medusa, of the target itself (peft),
    merged into its weights when it is written.
    """

    r: Count = 16
    alpha: Count = 32
    dropout: Beta = 0.0
    target_modules: Names | None = None


class DraftConfig(Section):
    """Shape of the draft. None takes the target's own value. `init_from` is a checkpoint to start from.

    EAGLE-3: `num_hidden_layers` (None: 1); `hidden_size`, with embeddings of the draft's own where it is not the
    target's, and `train_embeddings` for those of the same size; `sliding_window`: how many positions, its own included,
    a row sees at most; `norm_before_fc` norms the features before they are fused, all as one vector; EAGLE-3.1:
    `fc_norm` norms each of them, `norm_output` feeds the normed state to the next step. A draft of `init_from` keeps
    its own shape, feature layers and vocabulary.

    Medusa: `num_heads` (None: 4) of `num_hidden_layers` residual layers each (None: 1); `own_heads`: a vocabulary
    matrix for each instead of the target's; `sequential`: heads that read the tokens drafted before them;
    `tree_nodes`: of the tree calibrated on validation data (None: at most 32, as many as pay here; 0: no tree);
    `lora`: tune the target with the heads (Medusa-2), which is then served in the place of the unchanged one.

    Small models (method kd): `student` is the target with some layers left out (pruned; `keep_layers`, or how many
    and how to choose them), a narrow new model (fresh), or an existing one of the same vocabulary (sibling).
    """

    student: Literal["pruned", "fresh", "sibling"] | None = None
    num_hidden_layers: Count | None = None
    keep_layers: Annotated[list[Natural], Field(min_length=1)] | None = None
    choose_layers: Literal["importance", "even"] = "importance"
    train_embeddings: bool | None = None
    lora: LoraConfig | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    num_heads: Annotated[int, Field(ge=1, le=16)] | None = None
    own_heads: bool = False
    sequential: bool = False
    tree_nodes: Annotated[int, Field(ge=0, le=1024)] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: Count | None = None
    init_from: Text | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> "DraftConfig":
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and groups is not None and heads % groups:
            raise ValueError(f"found num_attention_heads {heads}, expected a multiple of num_key_value_heads {groups}")
        return self


class VllmConfig(Section):
    """The vLLM that fills the store of features.source vllm, by its method extract_hidden_states.

    Either it is started here: by the interpreter `python` (None: $DRAFTTRAIN_ENGINE_PYTHON, .venv-engines/bin/python)
    on `tensor_parallel_size` GPUs, max_model_len None being the longest row; `options` are more arguments of vllm.LLM.
    Or it is a `server` (http://host:port/v1) of the target as `model` (None: the one it serves, by its name), whose
    connector writes to a folder that this machine sees as `folder`. For an engine started here `folder` may be chosen
    (None: beside the store).

    `concurrency`: rows asked at a time; up to twice as many files lie in the folder, each until it is read (or for
    good: keep_files). `check_samples` rows are compared with the target's own features here first (0: none).
    """

    python: Text | None = None
    tensor_parallel_size: Count = 1
    gpu_memory_utilization: Share = 0.85
    max_model_len: Count | None = None
    options: dict[str, Any] = {}
    server: Text | None = None
    model: Text | None = None
    folder: Text | None = None
    concurrency: Count = 64
    check_samples: Natural = 4
    keep_files: bool = False

    @model_validator(mode="after")
    def _one_road(self) -> "VllmConfig":
        started = ("python", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "options")
        unread = ("model",) if self.server is None else started
        for name in unread:
            if getattr(self, name) != type(self).model_fields[name].default:
                expected = "it beside server" if self.server is None else "it without server, which has been started"
                raise ValueError(f"found {name} {getattr(self, name)!r}, expected {expected}")
        if self.server is not None and self.folder is None:
            raise ValueError(f"found server {self.server!r} alone, expected the folder that its connector writes to")
        return self


class FeaturesConfig(Section):
    """Where the target's hidden states come from and which hs[k] the draft reads (None: [2, n//2, n-3]).

    source: `online` (the target runs on each batch), `store` (read from the disk), `vllm` (a store that vLLM fills),
    `hybrid` (the first rows, as many as fit into `max_gib` GiB, training rows before validation rows, are stored, the
    target runs on the others) or `topk`.
    """

    source: Literal["online", "store", "hybrid", "topk", "vllm"] = "online"
    vllm: VllmConfig | None = None
    max_gib: Positive | None = None
    top_k: Count = 64
    layers: Annotated[list[Natural], Field(min_length=1)] | None = None
    dtype: StorageDtype = "bfloat16"
    batch_tokens: Count = 4096

    @field_validator("layers")
    @classmethod
    def _distinct(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and len(set(layers)) < len(layers):
            raise ValueError(f"found {layers}, expected distinct layers")
        return layers

    @model_validator(mode="after")
    def _room(self) -> "FeaturesConfig":
        if (self.max_gib is None) == (self.source == "hybrid"):
            found = "no max_gib" if self.max_gib is None else f"max_gib {self.max_gib:g}"
            raise ValueError(f"found {found} with source {self.source}, expected max_gib with source hybrid alone")
        if self.vllm is not None and self.source != "vllm":
            raise ValueError(f"found vllm with source {self.source}, expected source vllm, or no vllm")
        return self


class OnPolicyConfig(Section):
    """A share of the batches is continued by the draft itself and scored by the target, from progress `start` on."""

    share: Share = 0.5
    start: Ratio = 0.0
    max_new_tokens: Annotated[int, Field(ge=2)] = 64
    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: Natural = 0


class TrainingConfig(Section):
    """Names and meanings of transformers.TrainingArguments, except the batch, which is counted in tokens.

    `max_minutes` is wall-clock time, validation, measuring and saving included. `gradient_checkpointing`: the layers of
    a small model, or of the target under draft.lora, run again in the backward pass instead of keeping what they made.

    The draft that is kept is the best on validation: `select_by` acceptance, as measured in the evaluator's loop, or
    loss (None: acceptance; without data.validation the last draft is kept). Every `acceptance_steps` (None: eval_steps)
    and at the end `acceptance_prompts` are continued by `acceptance_new_tokens`, greedy, with `acceptance_k` drafts a
    round. `early_stopping_patience`: training ends after so many measurements in a row without gain.

    A step is bad where its loss or gradient norm is not finite or above `spike_factor` times the running median (None:
    spikes are no fault). Its batch is written into the run's bad_batches/, and `on_bad_step`: training stops there, or
    the step is skipped, at most `max_skips` in a row.

    Medusa-2 (draft.lora): `target_learning_rate` of the adapters on the target (None: a tenth of learning_rate), after
    `warmup_heads_steps` in which the heads alone learn; `anchor`: weight of the KL to the unchanged target.
    """

    num_train_epochs: Positive = 3.0
    max_steps: Annotated[int, Field(ge=-1)] = -1
    max_minutes: Positive | None = None
    learning_rate: Positive = 1e-4
    target_learning_rate: Positive | None = None
    anchor: NonNegative = 1.0
    warmup_heads_steps: Natural = 100
    warmup_steps: Natural = 100
    lr_scheduler_type: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    decay_fraction: Ratio = 0.2
    min_lr_ratio: Ratio = 0.05
    weight_decay: NonNegative = 0.01
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.95
    max_grad_norm: NonNegative = 1.0
    bf16: bool = True
    gradient_checkpointing: bool = False
    max_tokens_per_batch: Count = 16384
    gradient_accumulation_steps: Count = 1
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 7
    step_decay: Ratio = 0.8
    loss: LossName | Annotated[dict[LossName, Positive], Field(min_length=1)] = "forward_kl"
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    lk_eta: NonNegative = 3.0
    temperature: Positive = 1.0
    on_policy: OnPolicyConfig | None = None
    on_bad_step: Literal["stop", "skip"] = "stop"
    spike_factor: Annotated[float, Field(gt=1)] | None = None
    max_skips: Count = 5
    logging_steps: Count = 10
    eval_steps: Count = 500
    select_by: Literal["acceptance", "loss"] | None = None
    early_stopping_patience: Count | None = None
    acceptance_steps: Count | None = None
    acceptance_prompts: Count = 16
    acceptance_new_tokens: Annotated[int, Field(ge=2)] = 64
    acceptance_k: Count = 4
    save_steps: Count = 500
    save_total_limit: Count = 2
    seed: Natural = 0
    report_to: Names = []
    dataloader_num_workers: Natural = 0

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, steps: int) -> int:
        if steps == 0:
            raise ValueError("found 0, expected a positive number, or -1 to count epochs instead")
        return steps


class TreeConfig(Section):
    """A tree beside the chains: `topk` children a node and `nodes` in all, chosen by the draft's confidence (EAGLE-2),
    or fixed rank `paths` such as [[0], [1], [0, 0]].
    """

    topk: Count = 4
    nodes: Count = 16
    paths: Annotated[list[list[Natural]], Field(min_length=1)] | None = None


class EvaluationConfig(Section):
    """What is measured: numbers of drafted tokens `k`, temperatures and requests at a time, against plain decoding and
    two controls; `tree` and `policy` add configurations. `prompts`: a file, or a set such as builtin or mt-bench.
    """

    k: Counts = [1, 2, 3, 4, 5, 7]
    temperature: Temperatures = [0.0]
    top_p: Share = 1.0
    top_k: Natural = 0
    draft_mode: Literal["one_hot", "probabilistic"] = "one_hot"
    concurrency: Counts = [1]
    repeats: Count = 1
    tree: TreeConfig | None = None
    policy: Text | None = None
    quantize: Annotated[list[Literal["int8", "int4"]], BeforeValidator(_listed)] = []
    max_new_tokens: Count = 128
    prompts: Text | None = None
    num_prompts: Count = 64
    ngram: bool = True
    untrained: bool = True
    seed: Natural = 0


class ExportConfig(Section):
    """The dtype of the exported weights and the engine that is to load them."""

    dtype: StorageDtype = "bfloat16"
    engine: Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"] = "vllm"
