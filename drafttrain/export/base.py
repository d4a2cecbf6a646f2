"""What every exporter shares: its error, and the checks of its place and that no weight is lost in the cast."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.errors import UserError


class ExportError(UserError):
    """A draft that cannot be written for the engine asked for."""


def check_place(folder: Path, known: Collection[str], former: str) -> None:
    """ExportError for a folder with other files than a former export has; former: what such a thing is called."""
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in known) if folder.is_dir() else []
    if others or folder.is_file():
        raise ExportError(
            f"{folder} holds {', '.join(others[:4]) or 'something else'}; expected a new or empty folder, or a former "
            f"{former}, which is replaced. Mend: give another --output."
        )


def all_finite(tensor: Tensor) -> bool:
    """Whether every number of a floating tensor of any shape is finite, from its extremes, which carry a NaN;
    `isfinite` of it all makes tensors as large again and takes many times as long on a CPU.
    """
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def check_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """ExportError that names the weights which are not finite once cast to `dtype`."""
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not all_finite(tensor)]
    if broken:
        raise ExportError(
            f"{', '.join(broken[:6])} hold numbers that are not finite in {dtype}. Expected finite weights. "
            "Mend: export.dtype=bfloat16 if float16 overflows; otherwise go back to an earlier checkpoint."
        )
