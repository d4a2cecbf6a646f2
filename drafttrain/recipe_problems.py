"""What is wrong with a recipe, in words: one line per problem with the dotted key, the value found, what is expected.

Unknown keys get the setting that was probably meant, also when it lives in another section.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# Names that people bring from other trainers.
_OTHER_NAMES = {
    "per_device_train_batch_size": "use training.max_tokens_per_batch",
    "per_device_eval_batch_size": "use training.max_tokens_per_batch",
    "batch_size": "use training.max_tokens_per_batch",
    "max_seq_length": "use data.max_length",
    "warmup_ratio": "use training.warmup_steps",
    "epochs": "use training.num_train_epochs",
    "lr": "use training.learning_rate",
    "enable_thinking": "use data.chat_template_kwargs",
    "thinking": "use data.chat_template_kwargs",
    "reasoning_effort": "use data.chat_template_kwargs",
    "chat_template": "use the target's own, with data.chat_template_kwargs, or put chat_template.jinja into its folder",
    "model": "use target",
    "model_name_or_path": "use target.name_or_path",
}
_EXPECTED = {
    "method": "one of eagle3, medusa, kd",
    "target": "a hub id, a folder, a .gguf file, or a mapping with name_or_path",
    "target.name_or_path": "a hub id, a folder or a .gguf file",
    "data": "a mapping with train: a list of entries such as {path: conversations.jsonl}",
    "data.train": "a list of entries such as {path: conversations.jsonl}",
    "data.validation": "a list of entries such as {path: conversations.jsonl}",
    "data.test": "a list of entries such as {path: conversations.jsonl}",
}
_HINTS = {"evaluation.k": "the plain baseline is always run"}


def shown(value: Any) -> str:
    """The value as it is quoted in a message: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def problem_lines(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """One indented line for each problem that pydantic found in settings for `model`."""
    for problem in error.errors(include_url=False):
        loc = problem["loc"]
        key = ".".join(str(part) for part in loc) or "recipe"
        settings_key = ".".join(part for part in loc if isinstance(part, str))
        found, message = shown(problem["input"]), problem["msg"]
        match problem["type"]:
            case "extra_forbidden":
                line = f"{key}: unknown key (value {found}): {_suggestion(loc, model)}"
            case "missing":
                line = f"{key}: not given, expected {_EXPECTED[settings_key]}"
            case "value_error":
                message = message.removeprefix("Value error, ")
                line = f"{key}: {message if message.startswith('found ') else f'found {found}, {message}'}"
            case "list_type" if key in _EXPECTED:
                line = f"{key}: found {found}, expected {_EXPECTED[key]}"
            case "model_type":
                entry = "an entry such as {path: conversations.jsonl}"
                expected = entry if isinstance(loc[-1], int) else _EXPECTED.get(key, "a mapping of settings")
                line = f"{key}: found {found}, expected {expected}"
            case _:
                line = f"{key}: found {found}, {_expected(message)}"
        yield f"  {line} ({_HINTS[settings_key]})" if settings_key in _HINTS else f"  {line}"


def _expected(message: str) -> str:
    message = re.sub(r"^Input should be (greater|less)", r"expected a number \1", message)
    message = re.sub(r"^(Input|\w+) should (be|have)", r"expected", message)
    message = message.replace(
        "input was not a valid JSON value", "expected text (a date in quotes), a number or a list"
    )
    message = message.replace("a valid string", "text (in quotes where it looks like a number)")
    return re.sub(r"(, unable to|, got a number with| after validation).*", "", message)


def _suggestion(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The likely setting: the nearest name in the same section, the same name elsewhere, the nearest name elsewhere."""
    name = str(loc[-1])
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    section = ".".join(part for part in loc[:-1] if isinstance(part, str))
    known = [key.rpartition(".")[::2] for key in _keys(model, "")]
    here = [setting for place, setting in known if place == section]
    others = [pair for pair in known if pair[0] not in (section, "data.validation", "data.test")]
    near = [setting for setting in here if setting.startswith(name)] or difflib.get_close_matches(name, here, n=1)
    if near:
        meant = [(section, setting) for setting in near]
    else:
        far = difflib.get_close_matches(name, [setting for _, setting in others], n=1)
        meant = [pair for pair in others if pair[1] == name] or [pair for pair in others if pair[1] in far]
    if not meant:
        return f"expected one of {', '.join(here)}"
    return f"did you mean {' or '.join(f'{place}.{setting}'.lstrip('.') for place, setting in meant[:3])}?"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every dotted key below a model; the entries of a list count as one, so `data.train.path`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _keys(part, f"{prefix}{name}.")
