"""The messages of a row in one form: text, reasoning kept apart, tool calls, their results, and the tools offered."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.errors import UserError

Message = dict[str, Any]
"""role (system, developer, user, assistant, tool) and content (text; None only beside tool_calls); of an assistant also
reasoning_content and tool_calls [{"id", "type", "function": {"name", "arguments"}}]; of a tool tool_call_id and name.
"""
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
FOLLOWS = {None: ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
TEXT_PARTS = ("text", "input_text", "output_text")


class DataError(UserError):
    """Training or evaluation data that cannot be used: the message names the file and line, and the mend."""


class RowError(DataError):
    """One conversation that cannot be used, where the others can; `reason`: why, without its place, to be counted."""

    def __init__(self, source: str, reason: str, mend: str = "change or drop the row"):
        super().__init__(f"{source}: {reason}; {mend}")
        self.reason = reason


def parse_turns(turns: Any, kind: str, source: str) -> tuple[tuple[Message, ...], str | None]:
    """(messages, why no text model can be asked them or None) of a list of turns, `kind` messages or sharegpt.

    Raises DataError naming `source` and the message that does not fit, or roles out of order.
    """
    role_key, content_key = ("from", "value") if kind == "sharegpt" else ("role", "content")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{source}: found {short(turns)} for the turns, expected a list of at least one message")
    messages, refused = [], None
    for number, turn in enumerate(turns, start=1):
        message, other = parse_message(turn, f"{source}: message {number}", role_key, content_key)
        messages.append(message)
        refused = refused or other
    _check_alternation([message["role"] for message in messages], source)
    return tuple(messages), refused


def parse_message(
    turn: Any, place: str, role_key: str = "role", content_key: str = "content"
) -> tuple[Message, str | None]:
    """(message, why it is no text or None) of one turn. DataError naming `place` where it is none."""
    if not isinstance(turn, Mapping) or role_key not in turn:
        found = f"the keys {keys(turn)}" if isinstance(turn, Mapping) else type(turn).__name__
        raise DataError(f"{place}: found {found}, expected {role_key} and {content_key}")
    given = turn[role_key]
    if not isinstance(given, str) or given not in ROLES:
        raise DataError(f"{place}: found the role {given!r}, expected one of {', '.join(ROLES)}; drop the row")
    role = ROLES[given]
    calls = _tool_calls(turn, place) if role == "assistant" else []
    content, thought, refused = turn.get(content_key), "", None
    if isinstance(content, list):
        content, thought, refused = _of_parts(content, f"{place}: {content_key}")
    if content is not None or not calls:
        content = text_value(content, f"{place}: {content_key}")
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        named = next((turn[name] for name in REASONING if turn.get(name)), thought)
        if named:
            message["reasoning_content"] = text_value(named, f"{place}: the reasoning")
        if calls:
            message["tool_calls"] = calls
    elif role == "tool":
        given = [name for name in ("tool_call_id", "name") if turn.get(name)]
        message |= {name: text_value(turn[name], f"{place}: {name}") for name in given}
    return message, refused


def parse_tools(tools: Any, place: str) -> tuple[dict[str, Any], ...] | None:
    """The tools that a row offers, in OpenAI's form; a JSON text of the list will do. Keys without a value are left
    out: tables fill them in. DataError where it is no list of functions.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{place}: found text that is no JSON ({error}), expected a list of functions") from error
    if not tools:
        return None
    wrapped = []
    for tool in tools if isinstance(tools, list) else [tools]:
        tool = _filled(tool) if isinstance(tools, list) and isinstance(tool, Mapping) else {}
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: found {short(tools)}, expected a list of functions with name and parameters")
        wrapped.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(wrapped)


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _of_parts(parts: list, place: str) -> tuple[str, str, str | None]:
    """(text, reasoning, refused): text parts are joined by line breaks, as engines do for templates that take text."""
    text, thought, refused = [], [], None
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        value = part if isinstance(part, str) else part.get(kind) if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS:
            value = part["text"] if isinstance(part, Mapping) and "text" in part else value
            if not isinstance(value, str):
                raise DataError(f"{place}: found {short(parts)}, expected a string or a list of text parts")
            text.append(text_value(value, place))
        elif kind in ("thinking", "reasoning"):
            thought.append(_of_parts(value, place)[0] if isinstance(value, list) else text_value(value, place))
        else:
            refused = f"content that is not text alone ({kind})"
    return "\n".join(text), "\n".join(thought), refused


def _tool_calls(turn: Mapping, place: str) -> list[dict[str, Any]]:
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(calls, list):
        raise DataError(f"{place}: found {short(calls)} for tool_calls, expected a list")
    out = []
    for number, call in enumerate(calls, start=1):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping | str):
            raise DataError(
                f"{place}: found {short(call)} for tool call {number}, expected a function with name and arguments"
            )
        identity = {"id": call["id"]} if call.get("id") else {}
        out.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return out


def _check_alternation(roles: Sequence[str], source: str) -> None:
    head = 0
    while head < min(2, len(roles)) and roles[head] in ("system", "developer") and roles[head] not in roles[:head]:
        head += 1
    body = list(roles[head:])
    fits = all(role in FOLLOWS.get(last, ()) for last, role in zip([None, *body], body, strict=False))
    if not body or not fits:
        raise DataError(
            f"{source}: roles do not alternate: found {', '.join(roles)}, expected user, assistant, user, ... after an "
            "optional system message, and tool results behind an assistant's; merge or drop the turns"
        )


def text_value(value: Any, place: str) -> str:
    """The value where it is valid text; DataError naming `place` otherwise."""
    if not isinstance(value, str):
        raise DataError(f"{place}: found {short(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: found a lone surrogate (\\ud800 to \\udfff), expected valid Unicode text") from error
    return value


def keys(row: Mapping) -> str:
    """The keys of a row as they are quoted in a message."""
    return ", ".join(map(str, row)) or "(none)"


def short(value: Any) -> str:
    """Type and repr of a value as they are quoted in a message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
