"""A running vLLM or SGLang server: engine, model and version, streamed completions, its counters in our terms."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from drafttrain.data.http_client import EngineError, Server
from drafttrain.evaluate.engine_report import Answer, EngineCounts, EnginePrompt, Group, iterations_of
from drafttrain.evaluate.prometheus import Metrics
from drafttrain.nn.sampling import Sampling

SETTLE = 2.0  # seconds that a server may take to count what it has already answered
ENGINES = ("vllm", "sglang")
DELIVERED = {"vllm": "vllm:generation_tokens", "sglang": "sglang:generation_tokens"}
VLLM_DRAFTS = "vllm:spec_decode_num_drafts"
VLLM_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos"
VLLM_STEPS = "vllm:iteration_tokens_total_count"
SGLANG_VERIFY = "sglang:spec_verify_calls"


@dataclass
class EngineServer:
    """A server found at an address. metrics: whether it has counters; k: drafts a round, 0 without a draft, None where
    that is not told; tree: {"kind", "topk", "nodes"} for SGLang's trees."""

    server: Server
    engine: str
    version: str | None
    model: str
    metrics: bool
    k: int | None
    tree: dict[str, Any] | None = None
    notes: set[str] = field(default_factory=set)

    @classmethod
    def find(cls, server: Server, engine: str | None = None, model: str | None = None) -> "EngineServer":
        """Asks /v1/models, /metrics and, of SGLang, /server_info. EngineError where no model is served there, another
        one was asked for, or the engine is neither vLLM nor SGLang."""
        found = server.get_json("/v1/models")
        match found:
            case {"data": [{"id": str()}, *_] as models}:
                names = [entry["id"] for entry in models]
            case _:
                raise EngineError(
                    f"{server.url}/v1/models names no model: {str(found)[:200]}. Expected an OpenAI endpoint. Mend: "
                    "give the address of a vLLM or SGLang server"
                )
        if model is not None and model not in names:
            raise EngineError(f"{server.url} serves {', '.join(names)}, not {model!r}. Mend: --model with one of these")
        page = server.get("/metrics")
        metrics = Metrics.parse(page or "")
        told = next((name for name in ENGINES if metrics.has(f"{name}:")), models[0].get("owned_by"))
        engine = engine or told
        if engine not in ENGINES:
            raise EngineError(
                f"{server.url} is served by {engine!r}; expected vllm or sglang. Mend: --engine vllm or --engine sglang"
            )
        one = cls(server, engine, None, model or names[0], metrics.has(f"{engine}:"), None)
        one._describe(metrics)
        return one

    def _describe(self, metrics: Metrics) -> None:
        """Version, drafts a round, tree."""
        if self.engine == "vllm":
            self.version = (self.server.get_json("/version") or {}).get("version")
            if self.metrics:
                self.k = len(metrics.by_label(VLLM_POSITIONS, "position"))
            else:
                self.notes.add("/metrics is absent (vLLM: do not pass --disable-log-stats)")
            return
        info = self.server.get_json("/server_info") or self.server.get_json("/get_server_info") or {}
        self.version = info.get("version")
        if not self.metrics:
            self.notes.add("/metrics is absent (SGLang: --enable-metrics)")
        if "speculative_algorithm" in info:
            steps, topk, nodes = (
                info.get(f"speculative_{name}") or 0 for name in ("num_steps", "eagle_topk", "num_draft_tokens")
            )
            self.k = (steps or max(nodes - 1, 0)) if info["speculative_algorithm"] else 0
            if topk > 1:
                self.tree = {"kind": "dynamic", "topk": topk, "nodes": nodes - 1}

    def read(self) -> Metrics | None:
        """The counters now; None where the server has none."""
        return Metrics.parse(self.server.get("/metrics") or "") if self.metrics else None

    def run_group(
        self,
        prompts: Sequence[EnginePrompt],
        seeds: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        concurrency: int,
    ) -> Group:
        """Answers of the prompts, `concurrency` at a time, with their counts. Raises EngineError."""
        before = self.read() if self.k != 0 else None
        stop = threading.Event()

        def ask(pair) -> Answer:
            return self.complete(pair[0].content, pair[1], sampling, max_new_tokens, stop)

        pairs = list(zip(prompts, seeds, strict=True))
        if concurrency == 1:
            answers = [ask(pair) for pair in pairs]
        else:
            with ThreadPoolExecutor(concurrency) as pool:
                try:
                    answers = list(pool.map(ask, pairs))
                finally:  # The first failure, or Ctrl-C, ends the others at their next token.
                    stop.set()
                    pool.shutdown(cancel_futures=True)
        short = sum(answer.emitted < max_new_tokens for answer in answers)
        if short:
            self.notes.add("some answers ended before max_new_tokens: the server did not ignore the stop token")
        if self.k == 0:
            answers = [_with_counts(one, EngineCounts(0, 0, 0, (), one.emitted - 1)) for one in answers]
        elif any(answer.counts is None for answer in answers) and before is not None:
            pooled = self._difference(before, self._settled(before, answers), answers)
            if len(answers) == 1:
                answers = [_with_counts(answers[0], pooled)]
            return Group(tuple(answers), pooled)
        return Group(tuple(answers))

    def complete(
        self, prompt: str | Sequence[int], seed: int, sampling: Sampling, max_new_tokens: int, stop: threading.Event
    ) -> Answer:
        """One streamed completion: the time and the size of every delivery."""
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **{"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False},
            **({} if sampling.greedy else {"seed": seed}),
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            **({"return_spec_tokens_details": True} if self.engine == "sglang" else {}),
        }
        stream = _Stream(self.k)
        start = time.perf_counter()
        for now, event in self.server.stream("/v1/completions", body):
            stream.take(now, event)
            if stop.is_set():
                raise EngineError("stopped because another prompt failed")
        if not stream.times:
            raise EngineError(f"{self.server.url} answered without a token. Mend: see the server's log")
        return stream.answer(start)

    def _settled(self, before: Metrics, answers: Sequence[Answer]) -> Metrics:
        """The counters once everything delivered has been counted: engines answer first and count a moment later."""
        delivered, end = sum(answer.emitted for answer in answers), time.monotonic() + SETTLE
        while True:
            after = self.read()
            counted = _rise(before, after, DELIVERED[self.engine])
            if counted >= delivered or time.monotonic() > end:
                break
            time.sleep(0.01)
        if counted > delivered:
            self.notes.add("the server counted more tokens than it answered here: other clients spoil the acceptance")
        elif counted < delivered:
            self.notes.add("the server counted fewer tokens than it answered: the acceptance may lack some rounds")
        return after

    def _difference(self, before: Metrics, after: Metrics, answers: Sequence[Answer]) -> EngineCounts:
        delivered, single = sum(answer.emitted for answer in answers), len(answers) == 1
        if self.engine == "vllm":
            rounds, drafted, accepted = (
                _rise(before, after, f"vllm:spec_decode_num_{name}")
                for name in ("drafts", "draft_tokens", "accepted_tokens")
            )
            old, new = (metrics.by_label(VLLM_POSITIONS, "position") for metrics in (before, after))
            reached = tuple(int(new[i] - old.get(i, 0)) for i in sorted(new, key=int))
            steps = _rise(before, after, VLLM_STEPS) or None
            iterations = iterations_of(steps, delivered, accepted, self.k or 0) if single else None
            return EngineCounts(rounds, drafted, accepted, reached, iterations)
        # SGLang counts no accepted drafts. Each verify call yields them and one token more, the prefill one token; what
        # max_new_tokens cut from the last round is not seen.
        rounds = _rise(before, after, SGLANG_VERIFY)
        if not rounds:
            return EngineCounts(0, 0, 0, (), delivered - 1 if single else None)
        self.notes.add("accepted drafts derived from sglang:spec_verify_calls and the tokens delivered: a lower bound")
        return EngineCounts(rounds, None, max(delivered - len(answers) - rounds, 0), None, rounds if single else None)


def _rise(before: Metrics, after: Metrics, name: str) -> int:
    return round((after.total(name) or 0) - (before.total(name) or 0))


def _with_counts(answer: Answer, counts: EngineCounts) -> Answer:
    return Answer(**{**vars(answer), "counts": counts})


class _Stream:
    """Puts a streamed completion together."""

    def __init__(self, k: int | None):
        self.k = k
        self.times: list[float] = []
        self.runs: list[int] = []
        self.tokens: list[int] | None = []
        self.text = ""
        self.total = 0
        self.counts: EngineCounts | None = None

    def take(self, now: float, event: dict[str, Any]) -> None:
        choice = (event.get("choices") or [{}])[0]
        text, ids = choice.get("text") or "", choice.get("token_ids")
        used = (event.get("usage") or {}).get("completion_tokens") or 0
        count = len(ids) if ids is not None else max(used - self.total, 0) or bool(text)
        if choice and count:
            self.times.append(now)
            self.runs.append(int(count))
            self.tokens = None if ids is None or self.tokens is None else [*self.tokens, *ids]
        self.text += text
        self.total = max(self.total + (count if choice else 0), used)
        details = (event.get("metrics") or {}).get("speculative_decoding")
        if details:  # vLLM with --per-request-spec-decode-metrics
            histogram, drafted, k = (
                details[name] for name in ("acceptance_histogram", "num_draft_tokens", "num_spec_tokens")
            )
            self.counts = EngineCounts.of_histogram(histogram, drafted, k)
        details = (event.get("sglext") or {}).get("spec_tokens_details")
        if details and details["spec_verify_ct"]:
            self.counts = self._sglang(details)

    def _sglang(self, details: dict[str, Any]) -> EngineCounts:
        """SGLang verifies in every iteration; its accept length (completion tokens / verify calls) has the prefill's
        token in it and lacks what max_new_tokens cut, so it is not used."""
        rounds, accepted = details["spec_verify_ct"], details["spec_num_correct_drafts"]
        drafted, histogram = details["spec_num_proposed_drafts"], details["spec_correct_drafts_histogram"]
        reached = None
        if sum(histogram) == rounds:
            reached = EngineCounts.of_histogram(histogram, drafted, self.k or len(histogram) - 1).reached
        return EngineCounts(rounds, drafted, accepted, reached, rounds)

    def answer(self, start: float) -> Answer:
        times = self.times
        return Answer(
            tokens=None if self.tokens is None else tuple(self.tokens),
            text=self.text,
            emitted=self.total,
            ttft=times[0] - start,
            seconds=times[-1] - times[0],
            runs=tuple(self.runs),
            gaps=tuple(later - earlier for earlier, later in zip(times, times[1:], strict=False)),
            counts=self.counts,
        )
