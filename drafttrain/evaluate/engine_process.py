"""The subprocess that runs vLLM in its own environment: a job file, lines of JSON back, a log for what goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from drafttrain.data.http_client import EngineError

WORKER = Path(__file__).with_name("vllm_worker.py")
LOG_LINES = 8
GRACE = 10.0  # seconds between the request to end and the kill


class VllmWorker:
    """A context manager around one worker. The folder with job and log is removed, or kept and named in the error."""

    def __init__(self, python: Path, job: Mapping[str, Any], patience: float):
        self.python, self.patience = Path(python), patience
        self.folder = Path(tempfile.mkdtemp(prefix="drafttrain-vllm-"))
        self.output, self.log = self.folder / "output.jsonl", self.folder / "log.txt"
        self.output.touch()
        (self.folder / "job.json").write_text(json.dumps({**job, "output": str(self.output)}))
        self.process: subprocess.Popen | None = None
        self.failed = False

    def __enter__(self) -> Self:
        # -I keeps this package's folder and this interpreter's settings away from the other Python.
        command = [str(self.python), "-I", str(WORKER), str(self.folder / "job.json")]
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
                )
        except OSError as error:
            shutil.rmtree(self.folder)
            raise EngineError(
                f"{self.python} cannot be run ({error.strerror}); expected the Python of an environment with vLLM. "
                "Mend: make engine-venv, and give .venv-engines/bin/python"
            ) from error
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            _signal(self.process, signal.SIGTERM)
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                _signal(self.process, signal.SIGKILL)
                self.process.wait()
        if not self.failed:
            shutil.rmtree(self.folder)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The worker's lines as they come, until it has said that it is done. EngineError where it ends before that,
        says what has to be mended, or is silent for `patience` seconds."""
        heard = time.monotonic()
        with self.output.open(encoding="utf-8") as file:
            begun = ""
            while True:
                running = self.process.poll() is None
                while part := file.readline():
                    begun, heard = begun + part, time.monotonic()
                    if begun.endswith("\n"):
                        line, begun = json.loads(begun), ""
                        if line["kind"] == "error":
                            raise self._error(f"{line['message']}. Mend: make engine-venv, or give another Python")
                        if line["kind"] == "end":
                            return
                        yield line
                if not running:
                    raise self._error(f"vLLM ended with status {self.process.returncode}: {self._tail()}")
                if time.monotonic() - heard > self.patience:
                    raise self._error(f"vLLM gave no sign of life for {self.patience:.0f} s: {self._tail()}")
                time.sleep(0.05)

    def _tail(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LOG_LINES:]) or "it printed nothing"

    def _error(self, message: str) -> EngineError:
        self.failed = True
        return EngineError(f"{message}\n(job and whole log in {self.folder})")


def _signal(process: subprocess.Popen, number: int) -> None:
    """To the worker and what it has started: it leads a session of its own."""
    os.killpg(process.pid, number)


def environment() -> dict[str, str]:
    """This process's environment for the other Python: its engine in-process, its usage reports off."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        **kept,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
