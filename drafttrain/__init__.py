"""Train draft models for speculative decoding and prove what they are worth.

The public API, imported on first use: `load_target`, `load_draft`, `generate`, `evaluate`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["evaluate", "generate", "load_draft", "load_target"]

_HOME = {
    "load_target": "drafttrain.target",
    "load_draft": "drafttrain.drafts",
    "generate": "drafttrain.specdec.decode",
}


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        return import_module("drafttrain.evaluate")  # the package itself is callable
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
