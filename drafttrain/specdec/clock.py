"""Time by phase: the host's clock on a CPU; under CUDA events on the device's own stream, so that timing adds no
stalls.
"""

import time
from collections.abc import Sequence

import torch


class Clock:
    """Charges the time between two marks to a phase. Marks of one iteration are read together (`read`)."""

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """Everything since the last mark was `phase`."""
        if self._device is None:
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, event))

    def read(self) -> list[tuple[str, float]]:
        """(phase, seconds) of all marks since the last reading; waits for the device."""
        marks = self._marks
        if self._device is not None:
            marks[-1][1].synchronize()
        out = [(phase, _between(before, now)) for (_, before), (phase, now) in zip(marks, marks[1:], strict=False)]
        self._marks = marks[-1:]
        return out


def _between(before, now) -> float:
    return before.elapsed_time(now) / 1000 if isinstance(now, torch.cuda.Event) else now - before


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of them lies (nearest rank); None for none."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None
