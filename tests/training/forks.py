"""Processes of a test: forks of this one, which have everything imported. One is a run, or a rank of one."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState

from drafttrain.cli import run_command

LONGEST = 240.0


def fork(act: Callable[[], object], output: Path, rank: int = 0, world_size: int = 1, port: int = 0) -> int:
    """Run `act` as the command line does, in a process of its own; stdout and stderr go to `output`. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if world_size > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ |= {name: str(value) for name, value in names.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run_command(act)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ranks(act: Callable[[], object], folder: Path, count: int = 2) -> list[int]:
    """The processes of a distributed run (gloo); rank r writes to folder/rank-r.txt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [fork(act, folder / f"rank-{rank}.txt", rank, count, port) for rank in range(count)]


def wait(*pids: int) -> list[int]:
    """Exit statuses; a process that does not end is killed (-9)."""
    ends, found = time.monotonic() + LONGEST, {}
    while len(found) < len(pids):
        for pid in set(pids) - found.keys():
            if time.monotonic() > ends:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [found[pid] for pid in pids]
