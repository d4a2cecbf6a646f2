"""Conversations on their way to answers by the target: what has been sent and said, and the file of finished ones, from
which an interrupted run goes on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.data.chat import NOTHING, Encoded, continuation_ids, prompt_ids
from drafttrain.data.chat_answers import answer_message, calls_a_tool
from drafttrain.data.chat_messages import Message, RowError
from drafttrain.data.chat_template import Chat, need_template, use_template
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.recipe import RegenerateConfig
from drafttrain.target import Target

LINE_KEYS = ("index", "temperature", "finish", "input_ids", "loss_mask")
CHANGED = "answer that text does not carry (re-tokenised, it is not what the server wrote)"
UNWRITTEN = "answer that the chat template does not write back as it came (reasoning, a tool call)"
"""Why a conversation is dropped whose answers came as text, or as messages; also the finish of its line."""


@dataclass
class Talk:
    """A conversation under way: ids and mask so far end with the header that the next answer follows.

    earlier: (ids, mask) of the answers before, where the template writes the past otherwise than it was produced.
    """

    index: int
    temperature: float
    asked: list[list[Message]]
    """What is still to be sent before each answer: system message and user turn, or all of a past with tools."""
    tools: tuple[dict[str, Any], ...] | None = None
    said: list[Message] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    earlier: list[tuple[list[int], list[int]]] = field(default_factory=list)
    turn: int = 0
    finish: str = ""
    over: bool = False

    def add(self, ids: Sequence[int], produced: int) -> None:
        self.input_ids += ids
        self.loss_mask += [produced] * len(ids)

    def answered(self, tokens: Sequence[int], finish: str, target: Target) -> None:
        """Take what the target wrote; finish: "stop" where its last token is a stop, else why it ended."""
        self.finish = finish
        self.said.append(answer_message(tokens, target.tokenizer, self.input_ids, target.stop_ids))
        if calls_a_tool(tokens, target.tokenizer):
            self.asked.clear()  # What it would return is not known.
        self.add(tokens, 1)
        self.turn += 1

    def drop(self, reason: str) -> None:
        """End without a row: the answer cannot be told token by token."""
        self.finish, self.input_ids, self.loss_mask = reason, [], []


def asked_of(conversation: Conversation, target: Target, chat: Chat, index: int = 0) -> list[list[Message]]:
    """What is sent before each answer: the user turns, the first with the system message.

    A conversation with tools is answered once, behind its own past: at its answer number `index` mod their count, since
    what the target's own calls would return is not known. DataError for a row without a prompt.
    """
    if conversation.messages is not None:
        if len(conversation.messages) > 1 or not use_template(target.tokenizer, chat):
            need_template(target.tokenizer, chat, conversation.source)
        if conversation.refused:
            raise RowError(conversation.source, conversation.refused)
        return _with_tools(conversation, index) if conversation.uses_tools else _user_turns(conversation.messages)
    if conversation.prompt is None:
        raise DataError(
            f"{conversation.source}: found {'plain text' if conversation.text is not None else 'token ids'}, expected "
            "messages or a prompt for the target to answer; change the row, or leave out data.regenerate"
        )
    return [[{"role": "user", "content": conversation.prompt}]]


def _user_turns(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
    return turns[:-1]


def _with_tools(conversation: Conversation, index: int) -> list[list[Message]]:
    messages = list(conversation.messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        answers.append(len(messages))
    return [messages[: answers[index % len(answers)]]]


def send(talk: Talk, target: Target, chat: Chat, source: str) -> None:
    """Move what comes before the next answer from asked to said, and append its ids.

    Where the template writes what was said otherwise than it was asked and produced, as when it drops the reasoning of
    earlier turns, ids and mask so far become one of the earlier ones, and new ones begin with what it writes.
    """
    talk.said += talk.asked.pop(0)
    tokenizer = target.tokenizer
    try:
        between = None if talk.turn == 0 else continuation_ids(talk.said, tokenizer, talk.input_ids[-1], chat)
        if between is not None:
            talk.add(between, 0)
        else:
            if talk.turn:
                talk.earlier.append((talk.input_ids, talk.loss_mask))
            talk.input_ids, talk.loss_mask = [], []
            talk.add(prompt_ids(talk.said, tokenizer, chat, talk.tools, source), 0)
    except RowError:
        raise
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    if not talk.input_ids:
        raise DataError(f"{source}: found an empty prompt, expected at least one token; drop the row")


def goes_on(talk: Talk, target: Target, chat: Chat, limit: int, source: str) -> bool:
    """Ask the next turn; False where there is none, the last answer was cut, the template refuses the next one, or it
    would find no room.
    """
    if talk.finish != "stop" or not talk.asked:
        return False
    ids, mask, earlier = list(talk.input_ids), list(talk.loss_mask), list(talk.earlier)
    try:
        send(talk, target, chat, source)
        if len(talk.input_ids) < limit:
            return True
    except RowError:
        talk.asked.clear()
    talk.input_ids, talk.loss_mask, talk.earlier = ids, mask, earlier
    return False


def token_budget(talk: Talk, max_new_tokens: int, limit: int) -> int:
    """How many tokens the next answer may have."""
    return min(max_new_tokens, limit - len(talk.input_ids))


def header_of(
    target: Target,
    conversations: Sequence[Conversation],
    settings: RegenerateConfig,
    chat: Chat,
    max_length: int,
    served: str | None,
) -> dict[str, Any]:
    """What the answers depend on; served: the model's name on the server that answers. Batch size, address and
    concurrency are left out: they may change between two runs.
    """
    digest = hashlib.sha256()
    for conversation in conversations:
        asked = [[m["role"], m["content"]] for m in conversation.messages or () if m["role"] != "assistant"]
        digest.update(json.dumps([asked, conversation.prompt]).encode())
        if conversation.uses_tools:
            digest.update(json.dumps([conversation.messages, conversation.tools]).encode())
    return {
        "format": 1,
        "target": target.fingerprint,
        "prompts": digest.hexdigest(),
        "count": len(conversations),
        "chat": chat.mode,
        **({"chat_template_kwargs": dict(chat.switches)} if chat.switches else {}),
        "max_length": max_length,
        **settings.model_dump(exclude={"batch_size", "splits", "server", "model", "concurrency", "endpoint"}),
        **({} if served is None else {"served": served}),
    }


def open_answers(path: Path, header: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Finished conversations of an earlier run by index; writes the header of a new file. A torn last line goes."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    if not whole:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return {}
    if len(whole) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    lines = whole.splitlines()
    found = _parse(lines[0], path, 1)
    different = [key for key in sorted({*header, *found}) if header.get(key) != found.get(key)]
    if different:
        values = "; ".join(f"{key} {found.get(key)!r}, now {header.get(key)!r}" for key in different)
        raise DataError(f"{path} was regenerated with other settings ({values}); use --fresh, or remove the file")
    finished: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(lines[1:], start=2):
        line = _parse(text, path, number)
        if set(line) - {"earlier"} != set(LINE_KEYS):
            raise DataError(f"{path}:{number}: expected the keys {', '.join(LINE_KEYS)}; remove the file")
        finished[line["index"]] = line
    return finished


def _parse(text: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}:{number}: found no JSON object ({error}); remove the line, or the file") from error


def line_of(talk: Talk) -> dict[str, Any]:
    """A finished conversation as a line of the file."""
    line = {name: getattr(talk, name) for name in LINE_KEYS}
    return line | {"earlier": talk.earlier} if talk.earlier else line


def encoded_of(line: dict[str, Any], conversation: Conversation) -> list[Encoded]:
    """A line of the file as the rows that it becomes: one, and one for each of the earlier answers."""
    finish, source, domain = line["finish"], conversation.source, conversation.domain
    dropped = finish if finish in (CHANGED, UNWRITTEN) else None if any(line["loss_mask"]) else NOTHING
    open_turns = int(dropped is None and finish != "stop")
    earlier = [Encoded(ids, mask, None, source, 0, domain) for ids, mask in line.get("earlier", ())]
    return [*earlier, Encoded(line["input_ids"], line["loss_mask"], dropped, source, open_turns, domain)]
