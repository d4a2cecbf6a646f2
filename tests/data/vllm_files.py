"""What vLLM's hidden-state connector leaves, without vLLM: a stand-in for its Python that runs the real worker on a
fake `vllm`, and a fake server. The hidden states are the tiny target's own, computed beforehand and kept by their
tokens; the files are written as the connector does: a lock held from the start, the file behind it, late, in pieces and
in another order.
"""

import fcntl
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafttrain.target import Target
from tests.fake_http import QuietHandler, Serving

STUB = '''#!{python}
"""Runs the script it is given, with a fake vllm whose engine copies files that were computed before."""
import fcntl, hashlib, json, os, random, runpy, sys, threading, time, types

STATES, SEEN, MODE, DELAY = {states!r}, {seen!r}, {mode!r}, {delay!r}
FIRST_PID = os.getpid()


def seen(**line):
    with open(SEEN, "a") as file:
        file.write(json.dumps(line) + "\\n")


class LLM:
    def __init__(self, **arguments):
        if MODE == "fails":
            print("ValueError: no CUDA here")
            print(*(f"  at {{i}}" for i in range(20)), sep="\\n")
            sys.exit(3)
        self.folder = arguments["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]
        self.groups = self.number = 0
        seen(arguments=arguments, pid=os.getpid(), multiprocessing=os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])

    def generate(self, prompts, sampling, use_tqdm):
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        seen(rows=rows, sampling=sampling)
        self.groups += 1
        paths = []
        for ids in rows:
            path = os.path.join(self.folder, "%d-%08x.safetensors" % (self.number, random.getrandbits(32)))
            self.number += 1
            lock = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            paths.append((path, ids, lock))
        if MODE == "dies" and self.groups == 3:
            path, ids, lock = paths[0]
            open(path, "wb").write(content(ids)[:-9])
            os._exit(9)
        for path, ids, lock in random.sample(paths, len(paths)):
            threading.Thread(target=write, args=(path, content(ids), lock, self.number)).start()
        named = [None if MODE == "unnamed" else dict(hidden_states_path=path) for path, _, _ in paths]
        return [types.SimpleNamespace(kv_transfer_params=params) for params in named]


def content(ids):
    name = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    return open(os.path.join(STATES, name), "rb").read()


failed = []


def write(path, data, lock, number):
    time.sleep(random.random() * DELAY)
    if MODE == "cut" or (MODE == "cut once" and not failed):
        failed.append(path)
        data = data[: len(data) // 2]
    with open(path, "wb") as file:
        file.write(data[: len(data) // 3])
        file.flush()
        time.sleep(random.random() * DELAY)
        file.write(data[len(data) // 3 :])
    os.close(lock)


if MODE != "absent":
    sys.modules["vllm"] = types.SimpleNamespace(LLM=LLM, SamplingParams=dict, __version__="0.32.0")
else:
    sys.modules["vllm"] = None
no = types.SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(cuda=no, get_num_threads=lambda: 2, __version__="2.13.0")
assert sys.argv[1] == "-I"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
'''


def states_name(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def write_states(
    folder: Path,
    target: Target,
    rows: Sequence[Sequence[int]],
    layers: Sequence[int],
    change: Callable[[dict], dict] = lambda tensors: tensors,
    dtype: torch.dtype | None = None,
) -> None:
    """A file for each row, named by its tokens: the target's hs[k] of the layers, each row by itself."""
    folder.mkdir(exist_ok=True)
    for ids in rows:
        states = target.hidden_states(torch.tensor([ids]), None, layers)
        whole = torch.stack([states[k][0] for k in layers], 1)
        tensors = {"token_ids": torch.tensor(ids), "hidden_states": whole if dtype is None else whole.to(dtype)}
        save_file(change(tensors), folder / states_name(ids))


def write_stub(folder: Path, states: Path, mode: str = "fine", delay: float = 0.02) -> Path:
    """The stand-in for vLLM's Python; folder/seen.jsonl tells what its engines were asked."""
    path = folder / "python"
    text = STUB.format(
        python=sys.executable, states=str(states), seen=str(folder / "seen.jsonl"), mode=mode, delay=delay
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


def read_seen(folder: Path) -> list[dict]:
    path = folder / "seen.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked_rows(seen: Sequence[Mapping]) -> list[tuple[int, ...]]:
    return [tuple(ids) for line in seen for ids in line.get("rows", ())]


class _Handler(QuietHandler):
    fake: "FakeServer"

    def do_GET(self):
        entry = {"id": "target", "root": None, "max_model_len": self.fake.max_model_len}
        self.whole(200, json.dumps({"data": [entry]}))

    def do_POST(self):
        fake, body = self.fake, self.asked()
        with fake.lock:
            number = len(fake.bodies)
            fake.bodies.append(body)
        self.answer(fake.faults.get(number), lambda: fake.answer(number, body))


@dataclass
class FakeServer(Serving):
    """A server whose connector writes the files of `states` into `folder`, which it calls `named`.

    faults: {request number from 0: (status, body) or "lost"}; change: what becomes of each answer.
    """

    states: Path
    folder: Path
    named: str = "/on/the/server"
    max_model_len: int | None = None
    faults: Mapping[int, Any] = field(default_factory=dict)
    change: Callable[[dict], dict] = lambda answer: answer
    delay: float = 0.02
    bodies: list[dict] = field(default_factory=list)
    handler = _Handler
    path = "/v1"

    def answer(self, number: int, body: dict) -> dict:
        name = f"cmpl-{body['request_id']}-0-{number:08x}.safetensors"
        path = self.folder / name
        lock = path.with_name(f"{name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(path, body["prompt"], lock)).start()
        params = {"hidden_states_path": f"{self.named}/{name}"}
        return self.change({"choices": [{"text": "w1"}], "kv_transfer_params": params})

    def _write(self, path: Path, ids: Sequence[int], lock) -> None:
        time.sleep(self.delay)
        data = (self.states / states_name(ids)).read_bytes()
        with path.open("wb") as file:
            file.write(data[:100])
            file.flush()
            time.sleep(self.delay)
            file.write(data[100:])
        lock.close()
