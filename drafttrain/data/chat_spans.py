"""Where the answers lie in a rendered conversation: it is rendered once more with a mark for each content, and the text
is walked literal, content, literal. Nothing has to be a prefix of anything.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix

from drafttrain.data.chat_messages import Message, RowError
from drafttrain.data.chat_template import END_THINK, THINK, Messages, Rendering, free_mark

THOUGHT_END = re.compile(rf"\s*{END_THINK}\s*")
EMPTY_THOUGHT = re.compile(rf"\s*(?:{THINK}\s*)?{END_THINK}\s*")
THINKING = re.compile(rf"(\s*{THINK})?(.*)({END_THINK})(.*)", re.DOTALL)
TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
Key = tuple[int, str]
"""Message, and which part of it: "r" reasoning, "a" content, "t0" the name of its first tool call."""


@dataclass(frozen=True)
class Span:
    """What the target wrote, in characters: floor, the earliest start of a supervised token; start; end. to_stop: it
    ends with the first stop token before `end` (tool calls, whose closing words are the target's too).
    """

    floor: int
    start: int
    end: int
    to_stop: bool = False


def answer_spans(messages: Messages, rendering: Rendering) -> list[Span]:
    """One span for each answer in rendering.text, which is that of `messages`.

    Everything from the header of an answer to its stop is the target's: reasoning, the words between channels, tool
    calls. An empty think block is the template's, as is reasoning that it leaves out. Raises RowError when the text
    does not follow its skeleton, or an answer or its tool calls are not in it.
    """
    text = rendering.text
    mark = mark_for(messages, rendering, text)
    marked, contents = mark_parts(messages, mark)
    pieces = re.split(rf"{mark}(\d+)(r|a|t\d+)z", rendering.render(marked))
    literals, keys = pieces[::3], [(int(i), part) for i, part in zip(pieces[1::3], pieces[2::3], strict=True)]
    places = _walk(text, literals, keys, contents, rendering.source)
    _check_found(messages, contents, keys, rendering.source)
    spans, headers = [], {}
    for i in sorted({i for i, _ in keys if messages[i]["role"] == "assistant"}, key=lambda i: _first(keys, i)):
        first, last = _first(keys, i), _last(keys, i)
        start, end = places[first][0], places[last][1]
        before = literals[first]
        if before not in headers:  # Mostly one for all answers.
            headers[before] = rendering.header(marked[:i], mark)
        plain = partial(rendering.plain_header, marked[:i], mark)
        floor, start = _answer_start(before, headers[before], plain, start, thinking=keys[first][1] == "r")
        if messages[i].get("tool_calls"):
            after = next((n for n in range(last + 1, len(keys)) if keys[n][0] != i), None)
            spans.append(Span(floor, start, len(text) if after is None else places[after][0], to_stop=True))
            continue
        closing = THOUGHT_END.match(literals[last + 1]) if keys[last][1] == "r" and (i, "a") not in contents else None
        spans.append(Span(floor, start, end + (closing.end() if closing else 0)))
    return spans


def mark_for(messages: Messages, rendering: Rendering, *texts: str) -> str:
    """A mark that occurs neither in the messages nor in the template."""
    said = [json.dumps(message, ensure_ascii=False, default=str) for message in messages]
    return free_mark([*texts, *said, rendering.template, json.dumps(rendering.options, default=str)])


def mark_parts(messages: Messages, mark: str) -> tuple[list[Message], dict[Key, str]]:
    """Messages with a mark for each content, reasoning and name of a tool that is called, and what each stands for."""
    marked, contents = [], {}
    for i, message in enumerate(messages):
        content, answers = message["content"] or "", message["role"] == "assistant"
        thinking = THINKING.fullmatch(content) if answers and "reasoning_content" not in message else None
        opening, reasoning, closing, answer = thinking.groups(default="") if thinking else ("", "", "", content)
        out = {**message}
        # Blank parts stay as they are: templates branch on emptiness, and there is nothing in them to look for.
        if message.get("reasoning_content", "").strip():
            contents[i, "r"] = message["reasoning_content"]
            out["reasoning_content"] = f"{mark}{i}rz"
        elif reasoning.strip():
            contents[i, "r"] = reasoning
            reasoning = f"{mark}{i}rz"
        if answer.strip():
            contents[i, "a"] = answer
            answer = f"{mark}{i}az"
        if message["content"] is not None:
            out["content"] = opening + reasoning + closing + answer
        if answers and message.get("tool_calls"):
            out["tool_calls"] = []
            for j, call in enumerate(message["tool_calls"]):
                contents[i, f"t{j}"] = call["function"]["name"]
                function = {**call["function"], "name": f"{mark}{i}t{j}z"}
                out["tool_calls"].append({**call, "function": function})
        marked.append(out)
    return marked, contents


def _first(keys: list[Key], i: int) -> int:
    return next(n for n, key in enumerate(keys) if key[0] == i)


def _last(keys: list[Key], i: int) -> int:
    """The last part of message i that had not been written before: results may name the tool once more."""
    return max(keys.index(key) for key in set(keys) if key[0] == i)


def _walk(
    text: str, literals: list[str], keys: list[Key], contents: dict[Key, str], source: str
) -> list[tuple[int, int]]:
    """(start, end) in `text` of each mark's content."""
    if not text.startswith(literals[0]):
        raise lost(source, literals[0])
    position, places = len(literals[0]), []
    for i, (key, after) in enumerate(zip(keys, literals[1:], strict=True), start=1):
        end = _content_end(text, position, contents[key], after, last=i == len(keys), source=source)
        places.append((position, end))
        position = end + len(after)
    return places


def _content_end(text: str, position: int, content: str, after: str, *, last: bool, source: str) -> int:
    for variant in _variants(content):
        end = position + len(variant)
        ends_well = not last or end + len(after) == len(text)
        if ends_well and text.startswith(variant, position) and text.startswith(after, end):
            return end
    # The template changed the content: go on at the next literal.
    end = len(text) - len(after) if last and text.endswith(after) else text.find(after, position) if after else -1
    if end < position or (last and end + len(after) != len(text)):
        raise lost(source, after)
    return end


def _variants(content: str) -> Iterator[str]:
    for chars in ("", "\n", None):
        head = content.lstrip(chars)
        for tail_chars in ("", "\n", None):
            yield head.rstrip(tail_chars)
    yield json.dumps(content, ensure_ascii=False)[1:-1]  # Results of tools are often written as a JSON string.


def _answer_start(
    before: str, header: str, plain_header: Callable[[], str | None], position: int, *, thinking: bool
) -> tuple[int, int]:
    """(earliest start of a supervised token, start of the answer) for content at `position` after the literal `before`.

    A token that joins the answer to white space before it is the target's only if the white space is not in the header.
    """
    extra = _behind_header(before, header)
    block = None if thinking else EMPTY_THOUGHT.match(extra)
    words = extra[block.end() :] if block else extra
    if words.strip():
        plain = plain_header()
        if plain is not None:
            extra = words = _behind_header(before, plain)
    if words.strip():
        return position - len(words), position - len(words)
    return position - (len(extra) - len(extra.rstrip())), position


def _behind_header(before: str, header: str) -> str:
    """What of `before` the target has to write itself; a tag that only begins like the header's is not the header's."""
    shared = len(commonprefix([before, header]))
    cut = next((tag.start() for tag in TAG.finditer(before) if tag.start() < shared < tag.end()), shared)
    return before[cut:]


def _check_found(messages: Messages, contents: dict[Key, str], keys: list[Key], source: str) -> None:
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        count, calls = keys.count((i, "a")), bool(message.get("tool_calls"))
        if (i, "a") in contents and count != 1 and not (calls and count == 0):
            raise RowError(
                source,
                f"the chat template renders an answer {count} times, expected once",
                f"found in message {i + 1}; mend the template or mark the answers in it with {{% generation %}}",
            )
        if calls and (i, "t0") not in keys:
            raise RowError(source, "the chat template does not write tool calls", f"found in message {i + 1}")


def lost(source: str, literal: str) -> RowError:
    """The error of a text that does not follow the skeleton of its template."""
    return RowError(
        source,
        "cannot tell the answers from the template's own text",
        f"expected {literal[:60]!r} where it is not; mark the answers in the chat template with "
        "{% generation %} ... {% endgeneration %}, or drop the row",
    )
