"""A target's chat template as a recipe uses it: the switches passed to it, the names under which it reads a message's
parts, and the text that it renders.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat_messages import REASONING, DataError, Message, RowError
from drafttrain.recipe import Recipe

ChatMode = Literal["auto", "template", "none"]
Messages = Sequence[Message]

KEY = "data.chat_template_kwargs"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
ANY_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
THINK, END_THINK = r"(?:<(?:\w+:)?think>|\[THINK\])", r"(?:</(?:\w+:)?think>|\[/THINK\])"
GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range", "dict"}
CODE_ERRORS = (TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What a template's own expressions raise on a message that they were not written for."""
MARKED = "zqx"


@dataclass(frozen=True)
class Chat:
    """How conversations become text: mode as data.chat; switches: data.chat_template_kwargs, passed to the template."""

    mode: ChatMode = "auto"
    switches: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe | None) -> "Chat":
        """That of a recipe; without one the target's template as it is."""
        return cls() if recipe is None else cls(recipe.data.chat, recipe.data.chat_template_kwargs)

    @classmethod
    def read(cls, chat: "Chat | ChatMode") -> "Chat":
        """The same; a bare mode stands for one without switches."""
        return cls(chat) if isinstance(chat, str) else chat


AnyChat = Chat | ChatMode


def use_template(tokenizer: PreTrainedTokenizerBase, chat: AnyChat) -> bool:
    """Whether a bare prompt goes through the template. DataError where switches are given and there is none."""
    chat = Chat.read(chat)
    if chat.switches and tokenizer.chat_template is None:
        raise DataError(
            f"{KEY}: found {dict(chat.switches)}, and the target's tokenizer has no chat template; leave it out"
        )
    return chat.mode == "template" or (chat.mode == "auto" and tokenizer.chat_template is not None)


def need_template(tokenizer: PreTrainedTokenizerBase, chat: AnyChat, source: str) -> None:
    """DataError naming `source` where there is no template, or data.chat forbids it."""
    if Chat.read(chat).mode == "none":
        raise DataError(f"{source}: messages need a chat template, but data.chat is none; set data.chat: template")
    if tokenizer.chat_template is None:
        raise DataError(
            f"{source}: messages need a chat template and the tokenizer has none; use the instruction-tuned target, "
            "put a chat_template.jinja into the target's folder, or give prompt and completion or plain text"
        )


class Rendering:
    """The text of one conversation, and of others rendered in the same form (Rendering.render).

    Form: tool arguments as an object or as JSON text, whichever the template takes; missing content is empty. Reasoning
    is passed under the names it reads (reasoning_content, reasoning, thinking), in the text between think tags where it
    only looks for those there, and else not at all. A developer's message is the system's where the template knows no
    such role. RowError where it refuses the conversation; DataError for switches it does not read.
    """

    def __init__(
        self,
        messages: Messages,
        tokenizer: PreTrainedTokenizerBase,
        chat: Chat,
        source: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ):
        self.tokenizer, self.source = tokenizer, source
        self.options = {"tools": list(tools) if tools else None, **chat.switches}
        self.template = tokenizer.get_chat_template(tools=self.options["tools"])
        self.reads = names_read(self.template)
        problem = unread_switch(self.template, tuple(chat.switches))
        if problem:
            raise DataError(problem)
        self.as_text = False
        self.text = self._choose(messages, add_generation_prompt)

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The text of messages."""
        return self.apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def apply(self, messages: Messages, **options: Any) -> Any:
        """tokenizer.apply_chat_template on messages in this form. RowError where the template refuses them."""
        messages = [self._as_read(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(messages, **self.options, **options)
        except (jinja2.TemplateError, *CODE_ERRORS) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RowError(self.source, f"the chat template refuses the conversation ({reason[:200]})") from error

    def header(self, messages: Messages, mark: str) -> str:
        """What stands behind the last mark of `messages`, which end before an answer, when it is about to begin."""
        return _behind(self.render(messages, add_generation_prompt=True), mark)

    def plain_header(self, messages: Messages, mark: str) -> str | None:
        """Of a template that ignores add_generation_prompt, what it writes before an answer of text; else None."""
        if self.render(messages, add_generation_prompt=True) != self.render(messages):
            return None
        answered = self.render([*messages, {"role": "assistant", "content": f"{mark}0yz"}])
        return _behind(answered.partition(f"{mark}0yz")[0], mark)

    def _choose(self, messages: Messages, open_end: bool) -> str:
        """The text in the first form that the template takes, kept for what is rendered later."""
        failed: RowError | None = None
        for self.as_text in (False, True) if any(message.get("tool_calls") for message in messages) else (False,):
            try:
                return self.render(messages, add_generation_prompt=open_end)
            except RowError as error:
                failed = failed or error
        raise failed

    def _as_read(self, message: Message) -> Message:
        out = {**message}
        if out["role"] == "developer" and "developer" not in self.reads:
            out["role"] = "system"
        out["content"] = out["content"] or ""
        thought = out.pop("reasoning_content", None)
        if thought is not None:
            names = [name for name in REASONING if name in self.reads]
            out |= dict.fromkeys(names, thought)
            if not names and "think tags" in self.reads:
                out["content"] = f"<think>\n{thought}\n</think>{out['content']}"
        if out.get("tool_calls"):
            out["tool_calls"] = [self._call(call) for call in out["tool_calls"]]
        return out

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.as_text and isinstance(arguments, str):
            arguments = _object(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _object(text: str) -> Any:
    """The object that a JSON text stands for, as engines pass it on; other text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _behind(text: str, mark: str) -> str:
    return re.split(rf"{mark}\d+(?:r|a|t\d+)z", text)[-1]


@lru_cache(maxsize=16)
def names_read(template: str) -> frozenset[str]:
    """Which of a message's parts a template reads: names of reasoning, "developer", and "think tags" in the content."""
    found = {name for name in REASONING if re.search(rf"\.{name}\b|['\"]{name}['\"]", template)}
    found |= {"developer"} if re.search(r"['\"]developer['\"]", template) else set()
    return frozenset(found | ({"think tags"} if "</think>" in template else set()))


@lru_cache(maxsize=16)
def unread_switch(template: str, names: tuple[str, ...]) -> str | None:
    """An error's words where the template reads one of the switches nowhere: it would be ignored without a word."""
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            known = sorted(_variables(template) - GIVEN - {"bos_token", "eos_token", "documents"})
            expected = f"expected some of {', '.join(known)}" if known else "it reads no switches; leave it out"
            return f"{KEY}.{name}: the target's chat template reads no {name}; {expected}"
    return None


def _variables(template: str) -> set[str]:
    """What a template reads from outside; of the names that it sets itself those that it asks for before."""
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    found = jinja2.meta.find_undeclared_variables(environment.parse(ANY_GENERATION_TAG.sub("", template)))
    inside = set(re.findall(r"\bset\s+(\w+)", template)) - set(
        re.findall(r"\b(\w+)\s+is\s+(?:not\s+)?defined", template)
    )
    return found - inside


def free_mark(texts: Sequence[str | None]) -> str:
    """A word that occurs in none of the texts, to stand for a content where it is looked for in a rendering."""
    mark = MARKED
    while any(mark in text for text in texts if text):
        mark += "q"
    return mark


def chat_facts(tokenizer: PreTrainedTokenizerBase, chat: AnyChat) -> dict[str, Any]:
    """What tells one way of asking from another, for manifests and reports: mode, switches, and what stands between a
    question and the answer to it (None where no template is used, or it takes no bare question).
    """
    chat = Chat.read(chat)
    facts = {"mode": "none", "chat_template_kwargs": dict(chat.switches), "header": None}
    if not use_template(tokenizer, chat) or tokenizer.chat_template is None:
        return facts
    mark = free_mark([tokenizer.get_chat_template()])
    question = [{"role": "user", "content": f"{mark}0az"}]
    try:
        header = Rendering(question, tokenizer, chat, "a question", add_generation_prompt=True).header(question, mark)
    except RowError:
        header = None
    return {**facts, "mode": "template", "header": header}
