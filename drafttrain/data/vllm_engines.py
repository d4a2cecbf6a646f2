"""The two ways to vLLM's hidden states: an engine that is started here, and a server that is there. Both are asked for
rows by number and name the file of each as it is answered.
"""

import json
import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from drafttrain.data.engine_process import PYTHON, VllmWorker, check_python
from drafttrain.data.http_client import BODY_SHOWN, EngineError, Server
from drafttrain.data.server_answers import complete
from drafttrain.recipe import VllmConfig

PATIENCE = 3600.0
"""Seconds until an engine that says nothing is given up: large models load, compile and capture for long."""

Rows = Sequence[tuple[int, Sequence[int]]]
Files = list[tuple[int, Path]]


class Road(ABC):
    """A context manager: `ask` for rows (number, token ids), then `answers` gives (number, file) of some of them."""

    facts: Mapping[str, Any]
    """What is known of the engine: version, device, python, or the server's address."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_) -> None: ...

    @abstractmethod
    def ask(self, rows: Rows) -> None:
        """Queue rows, none of which is in the asking. EngineError where the engine is gone."""

    @abstractmethod
    def answers(self) -> Files:
        """Wait for at least one answer. EngineError where none can come."""

    @abstractmethod
    def check(self) -> None:
        """EngineError where whoever writes the files is known to be gone."""


class StartedEngine(Road):
    """vLLM as a subprocess of another Python; see vllm_worker.py. It ends with this process, however that ends."""

    def __init__(self, python: Path, arguments: Mapping[str, Any]):
        self.facts: Mapping[str, Any] = {}
        self._worker = VllmWorker(python, {"llm": arguments}, PATIENCE, told=True)

    def __enter__(self) -> Self:
        self._worker.__enter__()
        self._lines = self._worker.lines()
        return self

    def __exit__(self, *error) -> None:
        self._worker.__exit__(*error)

    def ask(self, rows: Rows) -> None:
        self._worker.tell([[number, list(ids)] for number, ids in rows])

    def answers(self) -> Files:
        for line in self._lines:
            if line["kind"] == "engine":
                self.facts = {key: line[key] for key in ("version", "device", "python", "torch")}
            else:
                return [(number, _named(path)) for number, path in line["files"]]
        raise AssertionError("the worker ends when it is told to")

    def check(self) -> None:
        self._worker.check()


class RunningServer(Road):
    """A server of the target, asked for one token behind each row. `folder`: where this machine sees its files.

    tag: begins the id of every request, and so the name of every file, after the server's own "cmpl-". layers: the
    hs[k] that it should have been started with.
    """

    def __init__(self, server: Server, model: str, folder: Path, concurrency: int, tag: str, layers: Sequence[int]):
        self.server, self.model, self.folder, self.tag, self.layers = server, model, folder, tag, layers
        self.facts: Mapping[str, Any] = {"server": server.url, "model": model}
        self._pool = ThreadPoolExecutor(concurrency, "features")
        self._waiting: set[Future] = set()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, rows: Rows) -> None:
        self._waiting |= {self._pool.submit(self._ask, number, ids) for number, ids in rows}

    def answers(self) -> Files:
        assert self._waiting, "nothing was asked"
        done = wait(self._waiting, return_when=FIRST_COMPLETED).done
        self._waiting -= done
        return [future.result() for future in done]

    def check(self) -> None:
        """Nothing is known: the next request tells."""

    def _ask(self, number: int, ids: Sequence[int]) -> tuple[int, Path]:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "request_id": f"{self.tag}-{number}",
        }
        answer = complete(self.server, body, self._ended)
        match answer:
            case {"kv_transfer_params": {"hidden_states_path": str() as named}}:
                return number, self.folder / Path(named).name
            case found:
                raise EngineError(
                    f"{self.server.url} names no file of hidden states (it answered {str(found)[:BODY_SHOWN]}). "
                    "Expected kv_transfer_params.hidden_states_path. Mend: start it with "
                    f"{server_flags(self.layers, self.folder)}"
                )


def _named(path: str | None) -> Path:
    if path is None:
        raise EngineError(
            "vLLM names no file of hidden states. Expected one for each row. Mend: vLLM 0.32, and no connector in "
            "features.vllm.options"
        )
    return Path(path)


def speculative_config(layers: Sequence[int]) -> dict[str, Any]:
    """vLLM's speculative_config that stores hs[k] of the ascending `layers`, which it counts as this package does."""
    chosen = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": chosen},
    }


def transfer_config(folder: Path) -> dict[str, Any]:
    """vLLM's kv_transfer_config that writes them into `folder`."""
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def server_flags(layers: Sequence[int], folder: Path) -> str:
    """What a server of hidden states is started with, for a shell."""
    configs = (speculative_config(layers), transfer_config(folder))
    speculative, transfer = (shlex.quote(json.dumps(config)) for config in configs)
    return f"--no-enable-prefix-caching --speculative-config {speculative} --kv-transfer-config {transfer}"


def engine_arguments(
    settings: VllmConfig, model: str, dtype: str, layers: Sequence[int], longest: int, folder: Path
) -> dict[str, Any]:
    """Arguments of vllm.LLM; longest: positions of the longest row and what it needs behind it."""
    return {
        "model": model,
        "dtype": dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_model_len": settings.max_model_len or longest,
        "enable_prefix_caching": False,  # A row that shares another's cache may lack the states of what it shares.
        "speculative_config": speculative_config(layers),
        "kv_transfer_config": transfer_config(folder),
        **settings.options,
    }


def engine_python(settings: VllmConfig) -> Path:
    """The interpreter of vLLM's environment. EngineError where it is not there."""
    python = Path(settings.python or os.environ.get("DRAFTTRAIN_ENGINE_PYTHON") or PYTHON)
    others = "features.vllm.python, DRAFTTRAIN_ENGINE_PYTHON or, for a running one, features.vllm.server"
    check_python(python, f"or set {others}")
    return python
