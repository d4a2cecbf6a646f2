"""Which dtype a CPU multiplies fast: one without bf16 instructions (AVX-512 BF16, AMX, Arm's) emulates bf16 products,
several times as slowly as it multiplies float32.
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import nn

ROWS, WIDTH = 64, 512
EMULATED = 2.0
"""Times float32's seconds from which bf16 counts as emulated; with the instructions it is the faster one."""


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some calls, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


@functools.cache
def bf16_is_emulated() -> bool:
    """Whether this CPU takes more than twice as long for a product of many rows in bf16 as in float32; measured once in
    a process, in some milliseconds, on one thread, whose best times stand on a busy machine too.
    """

    def seconds(dtype: torch.dtype) -> float:
        rows, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
        return best_seconds(lambda: nn.functional.linear(rows, weight), 10)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(torch.bfloat16) > EMULATED * seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def bf16_note(device: torch.device, dtype: torch.dtype, autocast: bool = False) -> str | None:
    """A line for who runs a target of `dtype` on a CPU that emulates bf16, or trains under bf16 autocast there; None
    where nothing is slow.
    """
    if device.type != "cpu" or not (autocast or dtype == torch.bfloat16) or not bf16_is_emulated():
        return None
    settings = ["target.dtype=float32"] if dtype == torch.bfloat16 else []
    settings += ["training.bf16=false"] if autocast else []
    return (
        "this CPU has no bf16 instructions and emulates them: products of many rows take several times as long as in "
        f"float32. Mend: {' '.join(settings)}"
    )
