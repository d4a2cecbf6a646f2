"""CUDA graphs: a function of static tensors, captured once and replayed, so that a step costs its kernels and no
launches.

Elsewhere the function is simply called, with the same static inputs and outputs: what holds for a replay is then
tested on a CPU.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count

import torch
from torch import Tensor

WARM_UPS = 2
SMALLEST = 256


class Pool:
    """Memory that several graphs share. A replay may overwrite the outputs of every other graph of its pool; eager
    calls spoil those with NaN on purpose, so that code which reads them too late fails on a CPU too.
    """

    def __init__(self, device: torch.device):
        self.handle = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.members: list[Captured] = []


class Captured:
    """A function of tensors of fixed shapes that returns a tuple of tensors (or None).

    Under CUDA its first call captures it, later ones copy their arguments into its static inputs and replay. The
    outputs are static: the next call overwrites them, as may a call of any graph of the same pool; clone what is to
    stay. The function must do the same when called again with the same arguments (warm-ups run it more than once), may
    not wait for the device, and must hold every tensor it reads: a graph knows addresses alone.
    """

    def __init__(self, function: Callable[..., tuple[Tensor | None, ...]], rows: int, pool: Pool | None = None):
        self._function, self._rows, self._pool = function, rows, pool
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor | None, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            pool.members.append(self)

    @torch.no_grad()
    def __call__(self, device: torch.device, *values: Tensor) -> tuple[Tensor | None, ...]:
        """The outputs for these arguments, which may lie anywhere; the first call sets shapes, dtypes and the device.

        Fewer rows (dimension 0) than `rows` may be given: those behind keep their last values, zeros at first, and the
        outputs are cut to as many.
        """
        if self._outputs is None:
            self._inputs = [value.new_zeros(self._rows, *value.shape[1:], device=device) for value in values]
            for buffer, value in zip(self._inputs, values, strict=True):
                buffer[: len(value)] = value
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self._outputs = self._capture(device)
            else:
                self._outputs = self._run_first()
        else:
            for buffer, value in zip(self._inputs, values, strict=True):
                buffer[: len(value)].copy_(value, non_blocking=True)
            if self._graph is None:
                self._run_again()
        if self._graph is not None:
            with torch.cuda.device(device):
                self._graph.replay()
        return tuple(None if out is None else out[: len(values[0])] for out in self._outputs)

    def _capture(self, device: torch.device) -> tuple[Tensor | None, ...]:
        current, side = torch.cuda.current_stream(device), _stream(device, "warm-up")
        self._function(*self._inputs)  # What the function keeps is allocated on the stream that goes on using it.
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._function(*self._inputs)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        pool = self._pool.handle if self._pool is not None else None
        with torch.cuda.graph(self._graph, pool=pool, stream=_stream(device, "capture")):
            return self._function(*self._inputs)

    def _run_first(self) -> tuple[Tensor | None, ...]:
        self._spoil_others()
        self._function(*self._inputs)  # Twice, because a capture runs it more than once.
        return tuple(None if out is None else out.clone() for out in self._function(*self._inputs))

    def _run_again(self) -> None:
        self._spoil_others()
        for buffer, out in zip(self._outputs, self._function(*self._inputs), strict=True):
            if buffer is not None:
                buffer.copy_(out)

    def _spoil_others(self) -> None:
        for other in self._pool.members if self._pool is not None else ():
            for buffer in other._outputs or () if other is not self else ():
                if buffer is not None and buffer.is_floating_point():
                    buffer.fill_(torch.nan)


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """One for each purpose: every stream that runs a matrix product keeps a workspace."""
    return torch.cuda.Stream(device)


def padded(x: Tensor, width: int, value=0) -> Tensor:
    """x [B, n, ..] with dimension 1 filled up to `width` with a value."""
    missing = width - x.shape[1]
    return torch.cat([x, x.new_full((len(x), missing, *x.shape[2:]), value)], 1) if missing else x


def sizes(smallest: int = SMALLEST) -> Iterator[int]:
    """smallest (even) x 1, 1.5, 2, 3, 4, 6, ..: numbers of key columns of captured steps, few and with little waste."""
    for doubled in (smallest << i for i in count()):
        yield doubled
        yield doubled * 3 // 2


def rounded(columns: int, smallest: int = SMALLEST) -> int:
    """The first of `sizes` that holds so many columns."""
    return next(size for size in sizes(smallest) if size >= columns)
