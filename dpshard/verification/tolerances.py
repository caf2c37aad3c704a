"""Bounds on the rounding between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpshard.rules.torch_functions import outputs_of

HALF = (torch.bfloat16, torch.float16)


class Precision(TorchFunctionMode):
    """Notes if a function returned half precision, also under the model's autocast."""

    half = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and check its result."""
        result = func(*args, **(kwargs or {}))
        self.half = self.half or any(x.dtype in HALF for x in outputs_of(result))
        return result


def tolerance_across_sizes(tensors: Sequence[Tensor], *, half: bool) -> float:
    """Return the relative bound for two batch sizes; accelerators may use TF32."""
    if half or any(x.dtype in HALF for x in tensors):
        return 5e-2
    if any(x.dtype == torch.float32 for x in tensors):
        return 1e-4 if all(x.device.type == "cpu" for x in tensors) else 2e-2
    return 1e-6


def tolerance_at_one_size(x: Tensor, *, half: bool) -> float:
    """Return the relative bound for one batch size."""
    if half or x.dtype in HALF:
        return 3e-2
    if x.dtype == torch.float32:
        return 2e-5 if x.device.type == "cpu" else 5e-3
    return 1e-9


def differ(x: Tensor, y: Tensor, *, half: bool) -> bool:
    """Return True if values differ by more than rounding."""
    x, y = x.reshape(1, -1), y.reshape(1, -1)
    return x.shape != y.shape or bool(
        (largest_differences(x, y) > tolerance_at_one_size(x, half=half) * scale(x)).any()
    )


def row_bounds(x: Tensor, *, half: bool) -> Tensor:
    """Return the bound per row, for one batch size; 0 for whole numbers."""
    size = scale(x)
    if not x.is_floating_point():
        return 0 * size
    return tolerance_at_one_size(x, half=half) * size + 64 * torch.finfo(x.dtype).eps * size.max()


def largest_differences(x: Tensor, y: Tensor) -> Tensor:
    """Return, per row, the largest difference; infinity if only one is finite."""
    equal = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(equal, 0, x.double() - y.double()).abs().nan_to_num(torch.inf, torch.inf)
    return apart.reshape(len(x), -1).amax(1) if apart.numel() else apart.new_zeros(len(x))


def scale(y: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row, as float64."""
    y = y.double().nan_to_num(0, 0, 0).abs()
    return y.reshape(len(y), -1).amax(1) if y.numel() else y.new_zeros(len(y))
