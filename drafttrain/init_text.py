"""The text of a new recipe: YAML with a comment for each number that the target's config or its size decided."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafttrain.init_facts import Facts
from drafttrain.init_families import THINKING, Student, engine_words
from drafttrain.init_memory import Batch
from drafttrain.init_numbers import (
    GIB,
    HEADS,
    NODE,
    SMALL,
    WEIGHTS_SHARE,
    Shape,
    answer_batch,
    answer_tokens,
    draft_vocab,
    feature_layers,
    max_length,
)

WIDTH = 120
TITLES = {"eagle3": "EAGLE-3", "medusa": "Medusa heads", "kd": "A small draft"}
CHAT = "HuggingFaceH4/ultrachat_200k"


@dataclass(frozen=True)
class Plan:
    """What a recipe says beside the facts. data: (train, validation, test) files, empty ones for the public default;
    student: a sibling, or how many layers a pruned one keeps (method kd); memory: GiB of one GPU.
    """

    method: str
    data: tuple[Sequence[str], Sequence[str], Sequence[str]]
    memory: float
    shape: Shape
    batch: Batch
    student: Student | int | None = None


def switch_of(facts: Facts) -> tuple[str, object] | None:
    """(name, default) of the chat template's thinking switch, where the family has one and its template, if it is at
    hand, knows it.
    """
    found = THINKING.get(facts.kind)
    return found if found and (facts.template is None or found[0] in facts.template) else None


def recipe_text(facts: Facts, plan: Plan) -> str:
    """The whole recipe, every line at most 120 characters."""
    sections = [_head(facts, plan), _target(facts, plan), _data(facts, plan), _draft(facts, plan)]
    sections += [_training(facts, plan), _evaluation(facts, plan)]
    return "\n".join(line for section in sections for line in section) + "\n"


def _comment(text: str, indent: int = 0) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=f"{space}# ", subsequent_indent=f"{space}# ")


def _line(text: str, why: str | None = None) -> list[str]:
    """A setting and why, behind it or above it."""
    if why is None:
        return [text]
    whole = f"{text}  # {why}"
    if len(whole) <= WIDTH:
        return [whole]
    return [*_comment(why, len(text) - len(text.lstrip())), text]


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _head(facts: Facts, plan: Plan) -> list[str]:
    words = f"{TITLES[plan.method]} for {facts.title} ({facts.family}): {facts.layers} layers, width {facts.width:,}, "
    words += f"{facts.vocab:,} words, {_billions(facts.parameters)} parameters"
    if facts.experts:
        words += f", of which {_billions(facts.active)} a token: {facts.routed} of {facts.experts} experts"
    lines = [words + ". Written by drafttrain init from its config.json."]
    if facts.wrapper:
        lines.append(f"{facts.wrapper}: text alone is trained on, the draft reads the language model.")
    if facts.kind == "deepseek_v3":
        lines.append("The layer it drafts with itself (MTP) is not read: transformers leaves it out.")
    if plan.method == "eagle3":
        lines.append(f"The draft's RoPE, eps and {facts.positions:,} positions are the target's.")
    return _comment(" ".join(lines)) + _comment(" ".join(engine_words(facts, plan.method)))


def _target(facts: Facts, plan: Plan) -> Iterator[str]:
    yield f"method: {plan.method}"
    count, size = plan.batch.gpus, facts.weight_bytes / 1e9
    if facts.quantised:
        whole = facts.parameters * 2 / 1e9
        stored = f"stored as {facts.quantised}, about {size:.0f} GB; unpacked to bf16 they take {whole:.0f} GB"
        yield from _comment(f"Its weights are {stored}.")
    if count == 1:
        yield f"target: {_name(facts.name)}"
        return
    yield "target:"
    yield f"  name_or_path: {_name(facts.name)}"
    words = f"{size:.0f} GB of weights: {count} GPUs of {plan.memory:g} GiB or more, in one process (drafttrain train)"
    if count > NODE:
        words += f"; {NODE} of {facts.weight_bytes / NODE / WEIGHTS_SHARE / GIB:.0f} GiB do as well"
    yield from _comment(words + ".", 2)
    yield "  device_map: auto"


def _name(name: str) -> str:
    plain = name.replace("/", "").replace("-", "").replace(".", "").replace("_", "").isalnum()
    return name if plain and not name[0].isdigit() else f'"{name}"'


def _data(facts: Facts, plan: Plan) -> Iterator[str]:
    switch, own = switch_of(facts), any(plan.data)
    yield "data:"
    if own:
        for split, files in zip(("train", "validation", "test"), plan.data, strict=True):
            if files:
                yield f"  {split}: [{', '.join(f'{{path: {_name(file)}}}' for file in files)}]"
    else:
        weight = ", weight: 0.1" if facts.width < SMALL else ""
        yield f"  train: [{{dataset: {CHAT}, split: train_sft{weight}}}]"
        yield f'  validation: [{{dataset: {CHAT}, split: "test_sft[:256]"}}]'
        yield f'  test: [{{dataset: {CHAT}, split: "test_sft[256:512]"}}]'
    length = max_length(facts)
    why = f"of {facts.positions:,} positions; longer where served texts are"
    yield from _line(f"  max_length: {length}", "all its positions" if length == facts.positions else why)
    yield from _chat(facts, switch)
    rows = answer_batch(facts, plan.memory, switch is not None)
    answers = answer_tokens(facts, switch is not None)
    settings = f"max_new_tokens: {answers}, temperature: [0.0, 0.8], batch_size: {rows}"
    why = f"the target's own answers; {rows} rows by {facts.cache_bytes / 1024:.0f} KiB of keys and values a token"
    yield from _line(f"  regenerate: {{{settings}}}", why)
    if plan.method != "kd":
        words = draft_vocab(facts)
        if words is None:
            yield from _line("  draft_vocab: null", f"all {facts.vocab:,} words: too few to leave some out")
        else:
            share = f"the words its answers use most, {words / facts.vocab:.0%} of the rows of the target's head"
            yield from _line(f"  draft_vocab: {words}", share)


def _chat(facts: Facts, switch: tuple[str, object] | None) -> Iterator[str]:
    if facts.template is not None:
        yield from _line("  chat: template", "the target's own")
    else:
        yield from _line("  chat: auto", "the target's own template, plain text where it has none")
    if switch is not None:
        name, value = switch
        text = f"  chat_template_kwargs: {{{name}: {str(value).lower()}}}"
        yield from _line(text, "as the family's template has it: answers think; train as you serve")


def _draft(facts: Facts, plan: Plan) -> Iterator[str]:
    if plan.method == "eagle3":
        ids = feature_layers(facts.layers)
        rule = "[2, n//2, n-3], the engines' own default" if facts.layers >= 7 else "[1, n//2, n-1]"
        yield "features:"
        yield from _line(f"  layers: {ids}", f"hs[k] of {rule}")
        yield from _storage(facts)
        yield from _shape(facts, plan.shape)
    elif plan.method == "medusa":
        yield "draft:"
        yield from _line(f"  num_heads: {HEADS}", "a residual block each; they share the rows of the target's head")
    elif isinstance(plan.student, Student):
        ratio = facts.active / plan.student.parameters
        size = _billions(plan.student.parameters)
        yield "draft:"
        why = f"{size} parameters, 1/{ratio:.0f} of the target's; its tokenizer is compared before training"
        yield from _line(f"  init_from: {_name(plan.student.name)}", why)
    else:
        yield "draft:"
        yield "  student: pruned"
        why = f"of {facts.layers}, a start: drafttrain plan {facts.title} names the size that pays"
        yield from _line(f"  num_hidden_layers: {plan.student}", why)


def _storage(facts: Facts) -> Iterator[str]:
    size = 2 * 4 * facts.width * 1e6 / 1e9
    yield from _comment(
        f"source: store would keep {size:.1f} GB per million tokens: three features and the last state, in bf16.", 2
    )


def _shape(facts: Facts, shape: Shape) -> Iterator[str]:
    if shape.why_heads is None and shape.why_inner is None:
        words = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} of them for keys, MLP {shape.inner:,}"
        yield from _comment(f"The draft's one layer is shaped like the target's: {words}.")
        return
    yield "draft:"
    if shape.why_heads is not None:
        yield from _line(f"  num_attention_heads: {shape.heads}", shape.why_heads)
        yield f"  num_key_value_heads: {shape.kv_heads}"
        yield f"  head_dim: {shape.head_dim}"
    if shape.why_inner is not None:
        yield from _line(f"  intermediate_size: {shape.inner}", shape.why_inner)


def _training(facts: Facts, plan: Plan) -> Iterator[str]:
    small, sibling = facts.width < SMALL, isinstance(plan.student, Student)
    rate, why = _rate(plan.method, small, sibling)
    batch = plan.batch
    yield "training:"
    yield f"  num_train_epochs: {3 if small else 1 if sibling else 2}"
    yield from _line(f"  learning_rate: {rate}", why)
    fits = f"about {batch.total:.0f} of {plan.memory:g} GiB: target {batch.target:.0f}"
    words = f"{fits}, draft and optimizer {batch.draft:.0f}, the step {batch.step:.0f}"
    if batch.total > plan.memory:
        words += "; too much: a shorter max_length, features.source store, or FSDP"
    yield from _line(f"  max_tokens_per_batch: {batch.tokens}", words)
    yield f"  warmup_steps: {100 if small else 200 if sibling else 500}"
    if plan.method == "eagle3":
        yield from _line("  ttt_steps: 7", "for long runs; 3 where the budget is minutes")
    yield f"  eval_steps: {500 if small else 1000}"
    yield f"  save_steps: {500 if small else 1000}"


def _rate(method: str, small: bool, sibling: bool) -> tuple[str, str]:
    if method == "medusa":
        return "1.0e-3", "heads only, the target stays as it is (Medusa-1); not tuned for this target"
    if method == "kd" and sibling:
        return "2.0e-5", "a pretrained student: the usual rate of full fine-tuning"
    if method == "kd":
        return "3.0e-4", "layers that no longer fit together must move; not tuned for this target"
    if small:
        return "1.0e-3", "measured on Gemma 3 270M with about 1k tokens a step"
    return "1.0e-4", "not tuned for this target; narrow ones took 1e-3"


def _evaluation(facts: Facts, plan: Plan) -> Iterator[str]:
    deepest = {"eagle3": [1, 2, 3, 4, 5, 7], "medusa": [1, 2, 3, 4], "kd": [1, 2, 3, 4, 5]}[plan.method]
    yield "evaluation:"
    yield f"  k: {deepest}"
    yield f"  temperature: [0.0, {0.8 if facts.width < SMALL else 1.0}]"
    yield "  draft_mode: probabilistic"
