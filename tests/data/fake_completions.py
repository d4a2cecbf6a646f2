"""A small HTTP server of /v1/models and /v1/completions whose model is a table: after a token comes the same other one,
until a stop or max_tokens. With faults to order.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fake_http import QuietHandler, Serving


class _Handler(QuietHandler):
    fake: "FakeCompletions"

    def do_GET(self):
        fake = self.fake
        entry = {"id": fake.name, "root": fake.root, "max_model_len": fake.max_model_len}
        self.whole(200, json.dumps(fake.models or {"data": [entry]}) if self.path == "/v1/models" else "{}")

    def do_POST(self):
        fake = self.fake
        body = self.asked()
        with fake.lock:
            number = len(fake.bodies)
            fake.bodies.append(body)
            fake.paths.append(self.path)
            fake.headers.append(dict(self.headers))
            fake.running += 1
            fake.most = max(fake.most, fake.running)
        try:
            self.answer(fake.faults.get(number), lambda: fake.answer(body))
        finally:
            with fake.lock:
                fake.running -= 1


@dataclass
class FakeCompletions(Serving):
    """after: the token that follows each; stops: tokens that end an answer; decode: text of tokens.

    ids: whether token ids are returned; faults: {request number from 0: (status, body)} or "lost" for a connection that
    is cut; change: what becomes of each answer's choice. bodies: the requests so far; most: the largest number of them
    at a time.
    """

    after: Callable[[int], int]
    stops: tuple[int, ...]
    decode: Callable[[list[int]], str]
    name: str = "model"
    root: str | None = None
    max_model_len: int | None = None
    ids: bool = True
    faults: Mapping[int, Any] = field(default_factory=dict)
    change: Callable[[dict], dict] = lambda choice: choice
    models: Any = None
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    running: int = 0
    most: int = 0
    handler = _Handler
    path = "/v1"

    def answer(self, body: dict) -> dict:
        tokens, last = [], body["prompt"][-1]
        while len(tokens) < body["max_tokens"] and not (tokens and last in self.stops):
            last = self.after(last)
            tokens.append(last)
        stopped = tokens[-1] in self.stops
        choice = {"text": self.decode(tokens[:-1] if stopped else tokens)}
        choice["finish_reason"] = "stop" if stopped else "length"
        if self.ids:
            choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
        return {"choices": [self.change(choice)], "usage": {"completion_tokens": len(tokens)}}
