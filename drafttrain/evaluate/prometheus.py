"""Prometheus counters of a serving engine, as its /metrics page gives them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Metrics:
    """One reading of a Prometheus page: (name, labels, value) for each sample."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Reads the text format; comments and lines that are no samples are passed over."""
        found = []
        for line in text.splitlines():
            match = SAMPLE.match(line)
            if match and not line.startswith("#") and _is_number(match[3]):
                found.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))
        return cls(tuple(found))

    def has(self, prefix: str) -> bool:
        """Whether any sample's name starts with prefix."""
        return any(name.startswith(prefix) for name, _, _ in self.samples)

    def total(self, name: str) -> float | None:
        """A counter summed over all labels (engines, models), with or without the suffix _total; None if absent."""
        values = [value for found, _, value in self.samples if found in (name, f"{name}_total")]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A counter summed for each value of one label."""
        out: dict[str, float] = {}
        for found, labels, value in self.samples:
            if found in (name, f"{name}_total") and label in labels:
                out[labels[label]] = out.get(labels[label], 0.0) + value
        return out
