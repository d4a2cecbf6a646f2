"""The subprocess that runs vLLM in its own environment: a job file, lines of JSON back, a log for what goes wrong; and,
where it is told more on the way, lines to its standard input.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from drafttrain.data.http_client import EngineError

PYTHON = Path(".venv-engines/bin/python")
"""That of the environment which `make engine-venv` sets up."""
SET_UP = "make engine-venv (on CUDA with VLLM=vllm)"
WORKER = Path(__file__).with_name("vllm_worker.py")
LOG_LINES = 8
ERROR = re.compile(r"\b\w+Error: ")
GRACE = 10.0  # seconds between the request to end and the kill


def check_python(python: Path, otherwise: str) -> None:
    """EngineError where the interpreter of vLLM's environment is not there; otherwise: the other mends."""
    if not python.exists():
        raise EngineError(
            f"{python} is not there. Expected the Python of vLLM's environment. Mend: {SET_UP}, {otherwise}"
        )


class VllmWorker:
    """A context manager around one worker (vllm_worker.py). The folder with job and log is removed, or kept and named
    in the error.

    patience: seconds without a line after which it is given up. told: it reads lines (`tell`) from its standard input,
    which ends with this process; its engine is then a process of its own.
    """

    def __init__(self, python: Path, job: Mapping[str, Any], patience: float, told: bool = False):
        self.python, self.patience, self.told = Path(python), patience, told
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
                    command,
                    stdin=subprocess.PIPE if self.told else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(in_process=not self.told),
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(self.folder)
            raise EngineError(
                f"{self.python} cannot be run ({error.strerror}); expected the Python of an environment with vLLM. "
                f"Mend: {SET_UP}, and give {PYTHON}"
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
        if self.told:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self._end_engine()
        if not self.failed:
            shutil.rmtree(self.folder)

    def _end_engine(self) -> None:
        """Once the worker is gone: its engine's own processes."""
        limit = time.monotonic() + GRACE
        with suppress(ProcessLookupError):
            while time.monotonic() < limit:
                _signal(self.process, 0)
                time.sleep(0.05)
            _signal(self.process, signal.SIGKILL)

    def tell(self, value: Any) -> None:
        """One line of JSON to the worker's standard input. EngineError where it is gone."""
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._error(f"vLLM ended with status {self.process.wait()}: {self._tail()}") from error

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
                            raise self._error(f"{line['message']}. Mend: {SET_UP}, or give another Python")
                        if line["kind"] == "end":
                            return
                        yield line
                        heard = time.monotonic()
                if not running:
                    raise self._error(f"vLLM ended with status {self.process.returncode}: {self._tail()}")
                if time.monotonic() - heard > self.patience:
                    raise self._error(f"vLLM gave no sign of life for {self.patience:.0f} s: {self._tail()}")
                time.sleep(0.05)

    def check(self) -> None:
        """EngineError where the worker has ended."""
        if self.process.poll() is not None:
            raise self._error(f"vLLM ended with status {self.process.returncode}: {self._tail()}")

    def _tail(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        # The last lines of an engine of several processes only say that another one failed.
        cause = next((line for line in lines[:-LOG_LINES] if ERROR.search(line)), None)
        return "\n".join([*([cause, ".."] if cause else []), *lines[-LOG_LINES:]]) or "it printed nothing"

    def _error(self, message: str) -> EngineError:
        self.failed = True
        return EngineError(f"{message}\n(job and whole log in {self.folder})")


def _signal(process: subprocess.Popen, number: int) -> None:
    """To the worker and what it has started: it leads a session of its own."""
    os.killpg(process.pid, number)


def environment(in_process: bool = True) -> dict[str, str]:
    """This process's environment for the other Python: its engine in-process or not, its usage reports off."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
        **kept,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
