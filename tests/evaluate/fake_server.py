"""A small HTTP server that speaks what the evaluator asks of vLLM and SGLang, with scripted acceptance.

Round i of every request accepts accepts[i % len] drafts and delivers one token more; the prefill delivers one token.
Counters count whole rounds, as the engines do, also where max_tokens cuts the last one. Token i of an answer to a
prompt of ids p is (sum(p) + i) % 97, so that any two servers answer alike."""

import json
import time
from dataclasses import dataclass, field

from tests.fake_http import QuietHandler, Serving


class _Handler(QuietHandler):
    fake: "FakeEngine"
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        engine = self.fake
        answers = {
            "/v1/models": {"data": [{"id": engine.model, "owned_by": engine.flavour}]},
            "/version": {"version": "0.32.0"} if engine.flavour == "vllm" else None,
            "/server_info": self.server_info() if engine.flavour == "sglang" else None,
        }
        if self.path == "/metrics" and engine.metrics:
            self.whole(200, engine.page())
        elif answers.get(self.path):
            self.whole(200, json.dumps(answers[self.path]))
        else:
            self.whole(404, '{"detail":"Not Found"}')

    def server_info(self) -> dict:
        engine = self.fake
        speculation = {
            "speculative_algorithm": "EAGLE3" if engine.k else None,
            "speculative_num_steps": engine.k or None,
            "speculative_eagle_topk": engine.topk if engine.k else None,
            "speculative_num_draft_tokens": engine.k * engine.topk + 1 if engine.k else None,
        }
        return {"version": "0.5.23", **speculation}

    def do_POST(self):
        engine = self.fake
        body = self.asked()
        with engine.lock:
            number = len(engine.bodies)
            engine.bodies.append(body)
        if number in engine.refuses:
            self.whole(*engine.refuses[number])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deliveries, accepted = engine.deliveries(body["prompt"], body["max_tokens"])
        for position, tokens in enumerate(deliveries):
            if engine.dies == (number, position):
                self.close_connection = True
                self.connection.close()
                engine.close()
                return
            time.sleep(engine.pause)
            usage = {"completion_tokens": sum(len(one) for one in deliveries[: position + 1])}
            choice = {"index": 0, "text": "".join(chr(0x4E00 + token) for token in tokens)}
            choice["token_ids"] = tokens if engine.reports_ids else None
            self.event({"choices": [choice], "usage": usage})
        if number == engine.fails:
            self.event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
            return
        self.event({"choices": [], "usage": usage, **self.details(accepted)})
        if not engine.lag:
            engine.count(accepted, body["max_tokens"])
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        if engine.lag:
            time.sleep(engine.lag)
            engine.count(accepted, body["max_tokens"])

    def details(self, accepted: list[int]) -> dict:
        engine = self.fake
        if not (engine.details and engine.k):
            return {}
        histogram = [accepted.count(j) for j in range(max(accepted) + 1)]
        drafted = len(accepted) * engine.k * engine.topk
        if engine.flavour == "vllm":
            counts = {"acceptance_histogram": histogram, "num_draft_tokens": drafted, "num_spec_tokens": engine.k}
            return {"metrics": {"speculative_decoding": counts}}
        counts = {
            "spec_verify_ct": len(accepted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_num_proposed_drafts": drafted,
            "spec_correct_drafts_histogram": histogram,
        }
        return {"sglext": {"spec_tokens_details": counts}}

    def event(self, value: dict) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@dataclass
class FakeEngine(Serving):
    """k 0: a server without a draft. dies: (request, delivery) at which the connection and the server break off, the
    first request being 0; refuses: {request: (status, body)}; fails: request whose stream holds an error event."""

    flavour: str = "vllm"
    k: int = 3
    accepts: tuple[int, ...] = (2, 3, 0)
    metrics: bool = True
    details: bool = False
    reports_ids: bool = True
    topk: int = 1
    model: str = "tiny"
    pause: float = 0.0
    lag: float = 0.0
    dies: tuple[int, int] | None = None
    refuses: dict[int, tuple[int, str]] = field(default_factory=dict)
    fails: int | None = None
    wrong_from: int | None = None
    foreign: int = 0
    bodies: list[dict] = field(default_factory=list)
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("rounds", "drafted", "accepted", "tokens", "steps"), 0)
    )
    reached: list[int] = field(default_factory=list)
    handler = _Handler

    def __enter__(self):
        self.reached = [0] * self.k
        return super().__enter__()

    def tokens(self, prompt, count: int) -> list[int]:
        start = sum(prompt) if isinstance(prompt, list) else len(prompt)
        out = [(start + i) % 97 for i in range(count)]
        return [
            token + 1 if self.wrong_from is not None and i >= self.wrong_from else token for i, token in enumerate(out)
        ]

    def deliveries(self, prompt, count: int) -> tuple[list[list[int]], list[int]]:
        """The tokens of every delivery, and the accepted drafts of every round."""
        tokens, runs, accepted = self.tokens(prompt, count), [1], []
        while sum(runs) < count:
            accepted.append(self.accepts[len(accepted) % len(self.accepts)] if self.k else 0)
            runs.append(accepted[-1] + 1)
        out = []
        for run in runs:
            out.append(tokens[:run])
            tokens = tokens[run:]
        return out, accepted

    def count(self, accepted: list[int], tokens: int) -> None:
        with self.lock:
            self.counters["tokens"] += tokens + self.foreign
            self.counters["steps"] += len(accepted) + 1
            for number in accepted if self.k else []:
                self.counters["rounds"] += 1
                self.counters["drafted"] += self.k if self.topk == 1 else self.k * self.topk
                self.counters["accepted"] += number
                for i in range(number):
                    self.reached[i] += 1

    def page(self) -> str:
        count = self.counters
        if self.flavour == "sglang":
            lines = [
                f'sglang:generation_tokens_total{{model_name="{self.model}",is_streaming="true"}} {count["tokens"]}'
            ]
            if self.k:
                lines += [f'sglang:spec_verify_calls_total{{model_name="{self.model}"}} {count["rounds"]}']
            return "\n".join(lines) + "\n"
        label = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{{{label}}} {float(count['tokens'])}",
            f"vllm:generation_tokens_created{{{label}}} 1.7e+09",
            f"vllm:iteration_tokens_total_count{{{label}}} {float(count['steps'])}",
        ]
        if self.k:
            for name, key in (("drafts", "rounds"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
                lines.append(f"vllm:spec_decode_num_{name}_total{{{label}}} {float(count[key])}")
            for i, number in enumerate(self.reached):
                lines.append(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {float(number)}'
                )
        return "\n".join(lines) + "\n"
