"""Time by phase: the host's clock on a CPU; under CUDA events on the device's own stream, so that timing adds no
stalls.
"""

import time
from collections.abc import Sequence

import torch


class Clock:
    """Charges the time between two marks to a phase. Marks of one iteration are read together (`read`).

    spread: the work runs on several devices, so that no one stream knows when it is done: every mark waits for all.
    """

    def __init__(self, device: torch.device, spread: bool = False):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" and not spread else None
        self._waits = device.type == "cuda" and spread
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """Everything since the last mark was `phase`."""
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._marks.append((phase, event))
            return
        if self._waits:
            for number in range(torch.cuda.device_count()):
                torch.cuda.synchronize(number)
        self._marks.append((phase, time.perf_counter()))

    def read(self) -> list[tuple[str, float]]:
        """(phase, seconds) of all marks since the last reading; waits for the device."""
        marks = self._marks
        if self._stream is not None:
            marks[-1][1].synchronize()
        out = [(phase, _between(before, now)) for (_, before), (phase, now) in zip(marks, marks[1:], strict=False)]
        self._marks = marks[-1:]
        return out


def _between(before, now) -> float:
    return before.elapsed_time(now) / 1000 if isinstance(now, torch.cuda.Event) else now - before


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of them lies (nearest rank); None for none."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None
