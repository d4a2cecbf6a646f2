"""What every exporter shares: its error, and the check that no weight is lost in the cast."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.errors import UserError


class ExportError(UserError):
    """A draft that cannot be written for the engine asked for."""


def check_finite(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """ExportError that names the weights which are not finite once cast to `dtype`."""
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise ExportError(
            f"{', '.join(broken[:6])} hold numbers that are not finite in {dtype}. Expected finite weights. "
            "Mend: export.dtype=bfloat16 if float16 overflows; otherwise go back to an earlier checkpoint."
        )
