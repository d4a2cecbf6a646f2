"""Answers from an OpenAI-compatible server of the target: token ids where it returns them (vLLM: return_token_ids),
else text, which is tokenised again and kept only where nothing changes, or a message, which the template writes back.
"""

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from drafttrain.data.chat import encode
from drafttrain.data.chat_answers import tokens_of_message
from drafttrain.data.chat_messages import DataError, parse_message
from drafttrain.data.chat_template import AnyChat, Chat
from drafttrain.data.conversations import Conversation
from drafttrain.data.http_client import BODY_SHOWN, EngineBusyError, EngineError, EngineLostError, Server
from drafttrain.data.talks import CHANGED, UNWRITTEN, Talk, token_budget
from drafttrain.recipe import RegenerateConfig
from drafttrain.target import Target

TRIES = 6
PAUSE = 1.0
"""Seconds before the second try; each further one waits twice as long."""
NO_LIMIT = 2**31
SWITCHES = "chat_template_kwargs"
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Named, because a server fills what is left out from the model's own generation_config."""


@dataclass
class AnswerServer:
    """A server of the target; `model` is its name there, max_positions the longest row it takes (prompt and answer)."""

    server: Server
    model: str
    max_positions: int
    settings: RegenerateConfig
    target: Target
    chat: AnyChat
    say: Callable[[str], None] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    told: bool = False

    @classmethod
    def find(cls, settings: RegenerateConfig, target: Target, chat: AnyChat, say=None) -> "AnswerServer":
        """Asks /v1/models. EngineError where the server does not answer, or serves another model than the target."""
        server = Server(settings.server, os.environ.get("OPENAI_API_KEY"))
        model, longest = find_model(server, settings.model, target, "data.regenerate")
        return cls(server, model, longest, settings, target, chat, say)

    def rounds(self, pending: list[Talk], limit: int) -> Iterator[tuple[list[Talk], int]]:
        """Answers one turn of one talk at a time, `concurrency` of them at once, in order of completion; yields it and
        the number of tokens that were kept. Its conversation goes on unless the consumer has set `over`.
        """
        pool = ThreadPoolExecutor(self.settings.concurrency, "answers")
        waiting, running = deque(pending), {}
        try:
            while waiting or running:
                while waiting and len(running) < self.settings.concurrency:
                    talk = waiting.popleft()
                    running[pool.submit(self._ask, talk, limit)] = talk
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    talk = running.pop(future)
                    yield [talk], self._take(talk, future)
                    if not talk.over:
                        waiting.appendleft(talk)
        finally:
            self.ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, talk: Talk, limit: int) -> dict[str, Any]:
        """One completion, asked again where the server is busy or gone for a while."""
        s = self.settings
        plain = s.endpoint == "completions"
        body = {
            "model": self.model,
            **({"prompt": talk.input_ids, "skip_special_tokens": False} if plain else self._messages(talk)),
            "max_tokens": token_budget(talk, s.max_new_tokens, limit),
            "temperature": talk.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "seed": random.Random(f"{s.seed}:{talk.index}:{talk.turn}").getrandbits(31),
            "stop_token_ids": list(self.target.stop_ids),
            "return_token_ids": True,
            **PLAIN,
        }
        return complete(self.server, body, self.ended, "/v1/completions" if plain else "/v1/chat/completions")

    def _messages(self, talk: Talk) -> dict[str, Any]:
        """What the chat endpoint is asked with: the messages, and what its template is to be told."""
        switches = Chat.read(self.chat).switches
        out: dict[str, Any] = {"messages": talk.said}
        return out | ({"tools": talk.tools} if talk.tools else {}) | ({SWITCHES: dict(switches)} if switches else {})

    def _take(self, talk: Talk, future: Future) -> int:
        match future.result():
            case {"choices": [{"text": str() as said} as choice, *_]} as answer:
                pass
            case {"choices": [{"message": {**said}} as choice, *_]} as answer:
                pass
            case found:
                raise EngineError(
                    f"{self.server.url} answered {str(found)[:BODY_SHOWN]}. Expected choices with text or a message. "
                    "Mend: see the server's log"
                )
        if choice.get("prompt_token_ids", answer.get("prompt_token_ids")) not in (None, talk.input_ids):
            raise EngineError(
                f"{self.server.url} put other tokens in front of its answer than it was given. Expected the prompt's "
                "own. Mend: serve the target with its own tokenizer and chat template"
            )
        if choice.get("token_ids") is None:
            if isinstance(said, str):
                tokens, reason = self._tokens_of(said, choice), CHANGED
            else:
                tokens = self._written(talk, said, choice)
                reason = CHANGED if tokens else UNWRITTEN
            if tokens is None or not self._counted(tokens, answer):
                talk.drop(reason)
                return 0
        else:
            tokens = choice["token_ids"]
        wrong = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if wrong:
            raise EngineError(
                f"{self.server.url} answered token {wrong[0]}. Expected ids below {self.target.vocab_size}, the "
                f"vocabulary of {self.target.name}. Mend: serve the target itself"
            )
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.target.stop_ids), None)
        talk.answered(tokens[:end], "stop" if end is not None else "length", self.target)
        return len(tokens[:end])

    def _tokens_of(self, text: str, choice: dict[str, Any]) -> list[int] | None:
        """The tokens of an answer that came as text; None where they do not become the same text again."""
        if not self.told and self.say is not None:
            self.say(
                f"note: {self.server.url} returns no token ids; answers are tokenised again, and dropped where that "
                "changes them (vLLM returns them: return_token_ids)"
            )
        self.told = True
        tokenizer, stops = self.target.tokenizer, self.target.stop_ids
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.decode(tokens, clean_up_tokenization_spaces=False) != text:
            return None
        if choice.get("finish_reason") == "stop" and not (tokens and tokens[-1] in stops):
            reason = choice.get("stop_reason")
            tokens = [*tokens, reason if reason in stops else self._end_of_turn()]
        return tokens

    def _written(self, talk: Talk, said: dict[str, Any], choice: dict[str, Any]) -> list[int] | None:
        """The tokens of an answer that came as a message, its reasoning and tool calls apart; None where the template
        does not write all of it back, or it was cut within them.
        """
        try:
            message, refused = parse_message({"role": "assistant", **said}, "the answer")
        except DataError:
            return None
        cut = choice.get("finish_reason") == "length"
        if refused or (cut and (message.get("tool_calls") or not message["content"])):
            return None
        tokenizer, stops = self.target.tokenizer, self.target.stop_ids
        tokens = tokens_of_message(message, talk.said, talk.input_ids, tokenizer, self.chat, talk.tools, stops)
        return tokens[:-1] if tokens and cut and tokens[-1] in stops else tokens

    def _counted(self, tokens: list[int], answer: dict[str, Any]) -> bool:
        """Whether there are as many tokens as the server counts; some do not count the stop, some count nothing."""
        counted = (answer.get("usage") or {}).get("completion_tokens")
        unspoken = bool(tokens) and tokens[-1] in self.target.stop_ids
        return counted in (None, len(tokens), len(tokens) - unspoken)

    def _end_of_turn(self) -> int:
        """The stop token that follows an answer in the template's own text."""
        said = Conversation(prompt="a", completion="b")
        options = {"chat": self.chat, "max_length": NO_LIMIT, "stop_ids": self.target.stop_ids}
        encoded = encode(said, self.target.tokenizer, **options)
        return [token for token, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True) if mask][-1]


def find_model(server: Server, asked: str | None, target: Target, section: str) -> tuple[str, int]:
    """(name, longest row: prompt and answer) of the model `asked` on a server, or of the one with the target's name.

    section: of the recipe, which holds `server` and `model`. EngineError where the server does not answer, or serves
    another model.
    """
    match server.get_json("/v1/models"):
        case {"data": [{"id": str()}, *_] as models}:
            pass
        case found:
            raise EngineError(
                f"{server.url}: /v1/models answered {str(found)[:BODY_SHOWN]}. Expected a list of models. Mend: "
                f"give {section}.server the address of an OpenAI endpoint, such as http://localhost:8000/v1"
            )
    names = ", ".join(entry["id"] for entry in models)
    if asked is not None:
        chosen = next((entry for entry in models if entry["id"] == asked), None)
        wanted, mend = f"{section}.model {asked!r}", "set it to one of these, or leave it out"
    else:
        chosen = next((entry for entry in models if _is_target(entry, target)), None)
        wanted = f"the target {target.name}"
        mend = f"start the server with the target, or set {section}.model if one of these has its weights"
    if chosen is None:
        raise EngineError(f"{server.url} serves {names}. Expected {wanted}. Mend: {mend}")
    return chosen["id"], chosen.get("max_model_len") or NO_LIMIT


def complete(server: Server, body: dict[str, Any], ended: threading.Event, path: str = "/v1/completions") -> Any:
    """The server's answer to a completion, asked again where it is busy or gone for a while, until `ended`."""
    for tried in range(TRIES):
        try:
            return server.post_json(path, body)
        except (EngineBusyError, EngineLostError):
            if tried == TRIES - 1 or ended.wait(PAUSE * 2**tried):
                raise
    raise AssertionError("the last try returns or raises")


def _is_target(entry: dict[str, Any], target: Target) -> bool:
    """Whether a served model has the target's name: all of it, or the last part of a path or hub id."""
    wanted = {target.name, PurePath(target.name).name.casefold()}
    found = [str(entry[key]) for key in ("id", "root") if entry.get(key)]
    return any(name in wanted or PurePath(name).name.casefold() in wanted for name in found)
