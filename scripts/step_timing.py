"""How a training step is timed and its memory read, alike on both sides of scripts/bench_train.py; needs torch alone.

A side is a process of its own: it gets a case as JSON in its first argument and prints one line of JSON.
"""

import ctypes
import gc
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Bytes above those held when it was made: of the process on a CPU (Linux), as torch allocated them on CUDA."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            # What the set-up has freed goes back first, and the peak starts anew: both would hide what a step takes.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            RESET.write_text("5")
            self.before = self._status("VmRSS")

    @staticmethod
    def _status(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())[1]) * 1024

    def read(self) -> int:
        """The highest so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return self._status("VmHWM") - self.before


def take_steps(step: Callable[[], float], case: dict) -> dict:
    """Seconds of each of case["steps"] calls after case["warmup"] ones, the peak over all of them, the last loss."""
    device = torch.device(case["device"])
    peak, seconds, loss = Peak(device), [], 0.0
    for _ in range(case["warmup"] + case["steps"]):
        start = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds[case["warmup"] :],
        "bytes": peak.read(),
        "loss": loss,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def random_rows(case: dict) -> dict[str, torch.Tensor]:
    """One text of random tokens and states: input_ids [1, T], features [1, T, 3 H], last_hidden [1, T, H]."""
    generator = torch.Generator().manual_seed(0)
    device, dtype = torch.device(case["device"]), getattr(torch, case["dtype"])
    T, H = case["tokens"], case["hidden"]
    rows = {
        "input_ids": torch.randint(0, case["vocab"], (1, T), generator=generator),
        "features": torch.randn(1, T, 3 * H, generator=generator).to(dtype),
        "last_hidden": torch.randn(1, T, H, generator=generator).to(dtype),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The same on both sides, over all that is trained."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4, fused=True)


def train_step(module: torch.nn.Module, loss_of: Callable[[], torch.Tensor], case: dict) -> Callable[[], float]:
    """Forward under autocast (bf16), backward, optimizer: what is timed."""
    optimizer = optimizer_of(module)
    device = torch.device(case["device"]).type

    def step() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=case["dtype"] == "bfloat16"):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def answer(side: Callable[[dict], dict]) -> None:
    """Run a side on the case in the first argument."""
    case = json.loads(sys.argv[1])
    print(json.dumps(side(case)))
