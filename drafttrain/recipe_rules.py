"""What settings of a recipe contradict each other or its method: settings that would be ignored are errors too."""

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

SMALL_MODEL = ("student", "keep_layers", "choose_layers", "train_embeddings", "lora")
MEDUSA = ("num_heads", "own_heads", "sequential", "tree_nodes")
EAGLE3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "sliding_window")
MEDUSA_2 = ("target_learning_rate", "anchor", "warmup_heads_steps")
MEASURED = ("acceptance_steps", "acceptance_prompts", "acceptance_new_tokens", "acceptance_k")
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ENGINES = {
    "eagle3": ("vllm", "sglang", "tensorrt-llm", "llama.cpp"),
    "medusa": ("vllm", "tensorrt-llm"),
    "kd": ("vllm", "sglang", "transformers", "llama.cpp"),
}
"""Which engines serve each kind of draft."""
ONE_LAYOUT = {
    "norm_before_residual": "it ignores that",
    "num_hidden_layers": "it names layers behind the first otherwise",
    "sliding_window": "it knows no window of a draft",
    "train_embeddings": "it puts the target's embeddings in their place",
    "features.layers": "it counts layers from hs[1] on",
}
UNSERVED = {
    "vllm": {},
    "sglang": ONE_LAYOUT,
    "tensorrt-llm": ONE_LAYOUT,
    "llama.cpp": {
        "norm_before_fc": "its converter has no name for that norm",
        "fc_norm": "it knows EAGLE-3 without",
        "norm_output": "it knows EAGLE-3 without",
        "num_hidden_layers": "it builds one layer",
        "sliding_window": "it knows no window of a draft",
        "features.layers": "it reads three layers",
    },
}
"""What of an EAGLE-3 draft an engine would serve otherwise than it was trained, without an error, and why."""


def student_kind(draft) -> str:
    """pruned, fresh or sibling; where the recipe's draft section does not say: sibling with init_from, else pruned."""
    return draft.student or ("sibling" if draft.init_from else "pruned")


def contradictions(recipe) -> Iterator[str]:
    """One line "key: found, expected" for each problem of a whole, otherwise valid `recipe.Recipe`."""
    if recipe.method == "kd":
        yield from _small_model(recipe)
    else:
        yield from _heads(recipe)
    if recipe.method != "medusa" or recipe.draft.lora is None:
        for name in _changed(recipe.training, MEDUSA_2):
            yield f"training.{name}: is for Medusa heads that tune the target; expected method medusa with draft.lora"
    if recipe.training.gradient_checkpointing and recipe.method != "kd" and recipe.draft.lora is None:
        yield "training.gradient_checkpointing: is for whole models; expected method kd, or medusa with draft.lora"
    yield from _selection(recipe)
    yield from _shards(recipe)
    engine, served = recipe.export.engine, ENGINES.get(recipe.method)
    if served and engine not in served:
        yield f"export.engine: found {engine!r}, expected one of {', '.join(served)} for method {recipe.method}"
    if recipe.features.source != "topk" and _changed(recipe.features, ("top_k",)):
        yield f"features.top_k: features.source is {recipe.features.source!r}; expected source topk, or no top_k"


def _changed(section: BaseModel, names: tuple[str, ...]) -> list[str]:
    """The names whose value is not the default. A saved recipe gives every key, so being given says nothing."""
    return [name for name in names if getattr(section, name) != type(section).model_fields[name].default]


def _shards(recipe) -> Iterator[str]:
    """What cannot go with a target whose layers are spread over processes."""
    if not recipe.target.shard:
        return
    if recipe.target.device_map is not None:
        yield f"target.shard: target.device_map is {recipe.target.device_map!r}; expected one of them"
    if recipe.target.gguf_file is not None:
        yield "target.shard: target.gguf_file is given; expected plain weights"
    if recipe.method == "kd" and student_kind(recipe.draft) == "pruned":
        yield "target.shard: a pruned student shares whole layers with the target; expected draft.init_from or fresh"
    if recipe.method == "medusa" and recipe.draft.lora is not None:
        yield "target.shard: draft.lora tunes the whole target; expected draft.lora null"


def _selection(recipe) -> Iterator[str]:
    """How the draft that is kept is chosen."""
    training = recipe.training
    if not recipe.data.validation:
        for name in _changed(training, ("select_by", "early_stopping_patience")):
            yield f"training.{name}: drafts are measured on data.validation, which is empty; expected some"
        return
    if training.select_by == "loss":
        for name in _changed(training, MEASURED):
            yield f"training.{name}: training.select_by is 'loss'; expected acceptance, or no {name}"
    if training.acceptance_steps is not None and training.acceptance_steps % training.eval_steps:
        yield (
            f"training.acceptance_steps: found {training.acceptance_steps}, expected a multiple of training.eval_steps "
            f"{training.eval_steps}: acceptance is measured together with the validation loss"
        )
    heads = recipe.draft.num_heads or 4
    if recipe.method == "medusa" and _changed(training, ("acceptance_k",)) and training.acceptance_k > heads:
        yield f"training.acceptance_k: found {training.acceptance_k} for {heads} heads; expected at most as many"


def _heads(recipe) -> Iterator[str]:
    """Methods that draft from the target's own features."""
    for name in _changed(recipe.draft, SMALL_MODEL):
        if (name, recipe.method) in (("lora", "medusa"), ("train_embeddings", "eagle3")):
            continue
        yield f"draft.{name}: found {getattr(recipe.draft, name)!r}, which is for method kd; this is {recipe.method}"
    if recipe.method == "medusa":
        yield from _medusa(recipe)
    else:
        yield from _eagle3(recipe)
        for name in _changed(recipe.draft, MEDUSA):
            yield f"draft.{name}: found {getattr(recipe.draft, name)!r}; method {recipe.method} has no such choice"
    for name in _changed(recipe.training, ("temperature", "on_policy")):
        yield f"training.{name}: only method kd has it; this is {recipe.method}"
    if recipe.features.source == "topk":
        yield "features.source: found 'topk', which has no features; expected online or store, or method kd"
    if "next_token" in _losses(recipe.training.loss):
        yield "training.loss: next_token is for method kd; expected cross_entropy, which is on the target's own choice"
    if recipe.evaluation.quantize:
        yield f"evaluation.quantize: only small models (method kd) are quantised; this is {recipe.method}"


def _eagle3(recipe) -> Iterator[str]:
    draft, layers, engine = recipe.draft, recipe.features.layers, recipe.export.engine
    if draft.head_dim is not None and draft.head_dim % 2:
        yield f"draft.head_dim: found {draft.head_dim}, expected an even number: rotary positions turn pairs"
    has = {name: getattr(draft, name) for name in EAGLE3}
    has |= {"num_hidden_layers": (draft.num_hidden_layers or 1) > 1, "train_embeddings": draft.train_embeddings}
    if draft.hidden_size is not None:
        has["train_embeddings"] = False  # Of another size they are served; whether it is one, the target says.
    for name, why in unserved(engine, has, layers):
        key = name if "." in name else f"draft.{name}"
        yield f"{key}: export.engine {engine} would serve another draft than was trained ({why}); expected vllm"


def unserved(engine: str, has: Mapping[str, object], layers: Sequence[int] | None) -> list[tuple[str, str]]:
    """(setting, why) of what an engine does not serve: `has` says which settings an EAGLE-3 draft makes use of, layers
    which hs[k] it reads (None: the default three).
    """
    limits = UNSERVED.get(engine, {})
    out = [(name, limits[name]) for name, used in has.items() if used and name in limits]
    unread = layers is not None and (len(layers) != 3 if engine == "llama.cpp" else 0 in layers)
    return [*out, ("features.layers", limits["features.layers"])] if unread and limits else out


def _medusa(recipe) -> Iterator[str]:
    for name in _changed(recipe.draft, (*SHAPE, *EAGLE3, "init_from")):
        yield f"draft.{name}: Medusa heads are as wide as the target and have no attention; leave it out"
    if recipe.training.ttt_steps != type(recipe.training).model_fields["ttt_steps"].default:
        yield "training.ttt_steps: heads are not unrolled; expected draft.num_heads"
    if recipe.features.layers is not None:
        yield "features.layers: Medusa heads read the last hidden state alone; leave it out"
    if recipe.draft.own_heads and recipe.data.draft_vocab is not None:
        yield "draft.own_heads: engines read a smaller data.draft_vocab with the shared head only; expected one of them"
    if recipe.export.engine == "tensorrt-llm" and (recipe.draft.sequential or recipe.data.draft_vocab is not None):
        yield (
            "export.engine: tensorrt-llm reads plain Medusa heads over the whole vocabulary; expected vllm, or "
            "data.draft_vocab null and draft.sequential false"
        )
    if recipe.draft.tree_nodes and not recipe.data.validation:
        yield "draft.tree_nodes: the tree is calibrated on data.validation, which is empty; expected some, or no nodes"
    steps, warmup = recipe.training.max_steps, recipe.training.warmup_heads_steps
    if recipe.draft.lora is not None and 0 < steps <= warmup:
        yield f"training.warmup_heads_steps: found {warmup} of training.max_steps {steps}; expected fewer"
    tree = recipe.evaluation.tree
    if tree is not None and tree.paths is None:
        yield "evaluation.tree: Medusa heads do not know the path that a growing tree follows; expected tree.paths"


def _small_model(recipe) -> Iterator[str]:
    draft, training = recipe.draft, recipe.training
    student = student_kind(draft)
    if recipe.features.layers is not None:
        yield "features.layers: a small model reads no hidden states of the target; leave it out"
    for name in _changed(training, ("ttt_steps", "step_decay")):
        yield f"training.{name}: a small model is not unrolled; leave it out"
    for name in _changed(draft, (*EAGLE3, *MEDUSA)):
        yield f"draft.{name}: a small model has no such switch; leave it out"
    if recipe.evaluation.tree is not None:
        yield "evaluation.tree: small models draft chains only; leave it out"
    if training.temperature != 1 and (recipe.data.draft_vocab is not None or recipe.features.source == "topk"):
        yield (
            f"training.temperature: found {training.temperature:g}, which needs the teacher's whole vocabulary; "
            "expected 1, or draft_vocab null and features.source online or store"
        )
    if training.on_policy is not None and "next_token" in _losses(training.loss):
        yield "training.on_policy: next_token would teach the draft its own words; expected a loss on the target's p"
    yield from _student(draft, student)


def _student(draft, student: str) -> Iterator[str]:
    if student == "sibling" and draft.init_from is None:
        yield "draft.init_from: not given, expected the hub id or folder of a small model of the same vocabulary"
    if student == "sibling":
        for name in _changed(draft, ("num_hidden_layers", "keep_layers", "choose_layers")):
            yield f"draft.{name}: a sibling keeps its layers; leave it out, or draft.student: pruned without init_from"
    if student != "sibling" and draft.init_from is not None:
        yield f"draft.init_from: found {draft.init_from!r} for a {student} student; expected draft.student: sibling"
    if draft.keep_layers is not None and draft.num_hidden_layers is not None:
        yield "draft.keep_layers: found beside draft.num_hidden_layers, expected one of the two"
    if draft.keep_layers is not None and student == "pruned" and _changed(draft, ("choose_layers",)):
        yield "draft.choose_layers: found beside draft.keep_layers, which names the layers; leave it out"
    if student == "fresh":
        if draft.hidden_size is None:
            yield "draft.hidden_size: not given, expected the width of the fresh student, such as 256"
        for name in _changed(draft, ("keep_layers", "choose_layers", "lora")):
            yield f"draft.{name}: a fresh student has no layers to start from; leave it out"
    else:
        for name in _changed(draft, SHAPE):
            yield f"draft.{name}: a {student} student keeps its own sizes; expected draft.student: fresh"
    if draft.lora is not None and draft.train_embeddings:
        yield "draft.train_embeddings: with draft.lora only the adapters are trained; expected one of the two"


def _losses(loss: str | dict) -> list[str]:
    return [loss] if isinstance(loss, str) else list(loss)
