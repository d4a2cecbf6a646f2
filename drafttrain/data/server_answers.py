"""Answers from an OpenAI-compatible server of the target: token ids where it returns them (vLLM: return_token_ids),
else text, which is tokenised again and kept only where nothing changes.
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

from drafttrain.data.chat import ChatMode, encode
from drafttrain.data.conversations import Conversation
from drafttrain.data.http_client import BODY_SHOWN, EngineBusyError, EngineError, EngineLostError, Server
from drafttrain.data.talks import CHANGED, Talk, token_budget
from drafttrain.recipe import RegenerateConfig
from drafttrain.target import Target

TRIES = 6
PAUSE = 1.0
"""Seconds before the second try; each further one waits twice as long."""
NO_LIMIT = 2**31
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
    chat: ChatMode
    say: Callable[[str], None] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    told: bool = False

    @classmethod
    def find(cls, settings: RegenerateConfig, target: Target, chat: ChatMode, say=None) -> "AnswerServer":
        """Asks /v1/models. EngineError where the server does not answer, or serves another model than the target."""
        server = Server(settings.server, os.environ.get("OPENAI_API_KEY"))
        match server.get_json("/v1/models"):
            case {"data": [{"id": str()}, *_] as models}:
                pass
            case found:
                raise EngineError(
                    f"{server.url}: /v1/models answered {str(found)[:BODY_SHOWN]}. Expected a list of models. Mend: "
                    "give data.regenerate.server the address of an OpenAI endpoint, such as http://localhost:8000/v1"
                )
        names = ", ".join(entry["id"] for entry in models)
        if settings.model is not None:
            chosen = next((entry for entry in models if entry["id"] == settings.model), None)
            wanted, mend = f"data.regenerate.model {settings.model!r}", "set it to one of these, or leave it out"
        else:
            chosen = next((entry for entry in models if _is_target(entry, target)), None)
            wanted = f"the target {target.name}"
            mend = "start the server with the target, or set data.regenerate.model if one of these has its weights"
        if chosen is None:
            raise EngineError(f"{server.url} serves {names}. Expected {wanted}. Mend: {mend}")
        return cls(server, chosen["id"], chosen.get("max_model_len") or NO_LIMIT, settings, target, chat, say)

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
        body = {
            "model": self.model,
            "prompt": talk.input_ids,
            "max_tokens": token_budget(talk, s.max_new_tokens, limit),
            "temperature": talk.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "seed": random.Random(f"{s.seed}:{talk.index}:{talk.turn}").getrandbits(31),
            "stop_token_ids": list(self.target.stop_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            **PLAIN,
        }
        for tried in range(TRIES):
            try:
                return self.server.post_json("/v1/completions", body)
            except (EngineBusyError, EngineLostError):
                if tried == TRIES - 1 or self.ended.wait(PAUSE * 2**tried):
                    raise
        raise AssertionError("the last try returns or raises")

    def _take(self, talk: Talk, future: Future) -> int:
        match future.result():
            case {"choices": [{"text": str() as text} as choice, *_]} as answer:
                pass
            case found:
                raise EngineError(
                    f"{self.server.url} answered {str(found)[:BODY_SHOWN]}. Expected choices with text. Mend: see the "
                    "server's log"
                )
        if choice.get("prompt_token_ids") not in (None, talk.input_ids):
            raise EngineError(
                f"{self.server.url} put other tokens in front of its answer than it was given. Expected the prompt's "
                "own. Mend: serve the target with its own tokenizer"
            )
        if choice.get("token_ids") is None:
            tokens = self._tokens_of(text, choice, answer)
            if tokens is None:
                talk.finish = CHANGED
                talk.input_ids, talk.loss_mask = [], []
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

    def _tokens_of(self, text: str, choice: dict[str, Any], answer: dict[str, Any]) -> list[int] | None:
        """The tokens of an answer that came as text; None where they cannot be those that the server chose: they do not
        become the same text again, or are not as many as it counts.
        """
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
        counted = (answer.get("usage") or {}).get("completion_tokens")
        unspoken = bool(tokens) and tokens[-1] in stops  # Some servers do not count the stop.
        return tokens if counted in (None, len(tokens), len(tokens) - unspoken) else None

    def _end_of_turn(self) -> int:
        """The stop token that follows an answer in the template's own text."""
        said = Conversation(prompt="a", completion="b")
        options = {"chat": self.chat, "max_length": NO_LIMIT, "stop_ids": self.target.stop_ids}
        encoded = encode(said, self.target.tokenizer, **options)
        return [token for token, mask in zip(encoded.input_ids, encoded.loss_mask, strict=True) if mask][-1]


def _is_target(entry: dict[str, Any], target: Target) -> bool:
    """Whether a served model has the target's name: all of it, or the last part of a path or hub id."""
    wanted = {target.name, PurePath(target.name).name.casefold()}
    found = [str(entry[key]) for key in ("id", "root") if entry.get(key)]
    return any(name in wanted or PurePath(name).name.casefold() in wanted for name in found)
