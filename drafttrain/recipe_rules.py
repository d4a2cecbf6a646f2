"""What settings of a recipe contradict each other or its method: settings that would be ignored are errors too."""

from collections.abc import Iterator

from pydantic import BaseModel

SMALL_MODEL = ("student", "keep_layers", "choose_layers", "train_embeddings", "lora")
MEDUSA = ("num_heads", "own_heads", "sequential", "tree_nodes")
MEDUSA_2 = ("target_learning_rate", "anchor", "warmup_heads_steps")
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ENGINES = {
    "eagle3": ("vllm", "sglang", "tensorrt-llm", "llama.cpp"),
    "medusa": ("vllm", "tensorrt-llm"),
    "kd": ("vllm", "sglang", "transformers", "llama.cpp"),
}
"""Which engines serve each kind of draft."""


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
    engine, served = recipe.export.engine, ENGINES.get(recipe.method)
    if served and engine not in served:
        yield f"export.engine: found {engine!r}, expected one of {', '.join(served)} for method {recipe.method}"
    if recipe.features.source != "topk" and _changed(recipe.features, ("top_k",)):
        yield f"features.top_k: features.source is {recipe.features.source!r}; expected source topk, or no top_k"


def _changed(section: BaseModel, names: tuple[str, ...]) -> list[str]:
    """The names whose value is not the default. A saved recipe gives every key, so being given says nothing."""
    return [name for name in names if getattr(section, name) != type(section).model_fields[name].default]


def _heads(recipe) -> Iterator[str]:
    """Methods that draft from the target's own features."""
    for name in _changed(recipe.draft, SMALL_MODEL):
        if name == "lora" and recipe.method == "medusa":
            continue
        yield f"draft.{name}: found {getattr(recipe.draft, name)!r}, which is for method kd; this is {recipe.method}"
    if recipe.method == "medusa":
        yield from _medusa(recipe)
    else:
        for name in _changed(recipe.draft, ("num_hidden_layers", *MEDUSA)):
            yield f"draft.{name}: found {getattr(recipe.draft, name)!r}; method {recipe.method} has no such choice"
    for name in _changed(recipe.training, ("temperature", "on_policy")):
        yield f"training.{name}: only method kd has it; this is {recipe.method}"
    if recipe.features.source == "topk":
        yield "features.source: found 'topk', which has no features; expected online or store, or method kd"
    if "next_token" in _losses(recipe.training.loss):
        yield "training.loss: next_token is for method kd; expected cross_entropy, which is on the target's own choice"
    if recipe.evaluation.quantize:
        yield f"evaluation.quantize: only small models (method kd) are quantised; this is {recipe.method}"


def _medusa(recipe) -> Iterator[str]:
    for name in (*_changed(recipe.draft, SHAPE), *_changed(recipe.draft, ("norm_before_residual", "init_from"))):
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
    for name in _changed(draft, ("norm_before_residual", *MEDUSA)):
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
