"""Conversations on their way to answers by the target: what has been sent and said, and the file of finished ones, from
which an interrupted run goes on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.data.chat import (
    NOTHING,
    ChatMode,
    Encoded,
    continuation_ids,
    need_template,
    prompt_ids,
    use_template,
)
from drafttrain.data.conversations import Conversation, DataError
from drafttrain.recipe import RegenerateConfig
from drafttrain.target import Target

LINE_KEYS = ("index", "temperature", "finish", "input_ids", "loss_mask")
CHANGED = "answer that text does not carry (re-tokenised, it is not what the server wrote)"
"""Why a conversation is dropped whose answers came as text; also the finish of its line."""


@dataclass
class Talk:
    """A conversation under way: ids and mask so far end with the header that the next answer follows."""

    index: int
    temperature: float
    asked: list[dict[str, str]]
    """System message and user turns still to be sent, in order."""
    said: list[dict[str, str]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    turn: int = 0
    finish: str = ""
    over: bool = False

    def add(self, ids: Sequence[int], produced: int) -> None:
        self.input_ids += ids
        self.loss_mask += [produced] * len(ids)

    def answered(self, tokens: Sequence[int], finish: str, target: Target) -> None:
        """Take what the target wrote; finish: "stop" where its last token is a stop, else why it ended."""
        self.finish = finish
        self.add(tokens, 1)
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
        self.said.append({"role": "assistant", "content": text})
        self.turn += 1


def asked_of(conversation: Conversation, target: Target, chat: ChatMode) -> list[dict[str, str]]:
    """System message and user turns of a conversation. DataError for a row without a prompt."""
    if conversation.messages is not None:
        if len(conversation.messages) > 1 or not use_template(target.tokenizer, chat):
            need_template(target.tokenizer, chat, conversation.source)
        return [message for message in conversation.messages if message["role"] != "assistant"]
    if conversation.prompt is None:
        raise DataError(
            f"{conversation.source}: found {'plain text' if conversation.text is not None else 'token ids'}, expected "
            "messages or a prompt for the target to answer; change the row, or leave out data.regenerate"
        )
    return [{"role": "user", "content": conversation.prompt}]


def send(talk: Talk, target: Target, chat: ChatMode, source: str) -> None:
    """Move the next user turn (and a system message before it) from asked to said, and append its ids."""
    while talk.asked[0]["role"] != "user":
        talk.said.append(talk.asked.pop(0))
    talk.said.append(talk.asked.pop(0))
    try:
        if talk.turn == 0:
            talk.add(prompt_ids(talk.said, target.tokenizer, chat), 0)
        else:
            talk.add(continuation_ids(talk.said, target.tokenizer, talk.input_ids[-1]), 0)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    if not talk.input_ids:
        raise DataError(f"{source}: found an empty prompt, expected at least one token; drop the row")


def goes_on(talk: Talk, target: Target, chat: ChatMode, limit: int, source: str) -> bool:
    """Ask the next turn; False where there is none, the last answer was cut, or the next one would find no room."""
    if talk.finish != "stop" or not talk.asked:
        return False
    answered = len(talk.input_ids)
    send(talk, target, chat, source)
    if len(talk.input_ids) < limit:
        return True
    del talk.input_ids[answered:], talk.loss_mask[answered:]
    return False


def token_budget(talk: Talk, max_new_tokens: int, limit: int) -> int:
    """How many tokens the next answer may have."""
    return min(max_new_tokens, limit - len(talk.input_ids))


def header_of(
    target: Target,
    conversations: Sequence[Conversation],
    settings: RegenerateConfig,
    chat: ChatMode,
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
    return {
        "format": 1,
        "target": target.fingerprint,
        "prompts": digest.hexdigest(),
        "count": len(conversations),
        "chat": chat,
        "max_length": max_length,
        **settings.model_dump(exclude={"batch_size", "splits", "server", "model", "concurrency"}),
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
        if set(line) != set(LINE_KEYS):
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
    return {name: getattr(talk, name) for name in LINE_KEYS}


def encoded_of(line: dict[str, Any], conversation: Conversation) -> Encoded:
    """A line of the file as the row that it becomes."""
    dropped = CHANGED if line["finish"] == CHANGED else None if any(line["loss_mask"]) else NOTHING
    open_turns = int(dropped is None and line["finish"] != "stop")
    source, domain = conversation.source, conversation.domain
    return Encoded(line["input_ids"], line["loss_mask"], dropped, source, open_turns, domain)
