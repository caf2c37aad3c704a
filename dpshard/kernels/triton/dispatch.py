"""Where kernels run, and on what: decided by the device, dtypes and sizes alone."""

from __future__ import annotations

import functools
import os
import subprocess
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_SMALLEST = 16
"""Positions, rows or columns that tensor cores take at least; fewer would be filled up with zeros."""

_MANY = 128
"""Programs that keep a GPU busy, about. With fewer tiles Gram matrices fit into its cache, and torch shares out the
sums over long rows."""


def run_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of `device`."""
    if os.environ.get("DPSHARD_TRITON") == "0" or not _is_installed():
        return False
    return interpreted() if device.type == "cpu" else device.type == "cuda" and _runs(device)


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _runs(device: torch.device) -> bool:
    """Whether a GPU has the tensor cores, and this machine what Triton compiles with."""
    if not _has_tensor_cores(device):
        return False
    try:
        from dpshard.kernels.triton import common

        common.launch(device)
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"Triton cannot launch kernels on {device} ({type(error).__name__}: {error}). torch's products serve "
            f"instead, slower in half precision. Triton needs a C compiler; DPSHARD_TRITON=0 silences this warning.",
            stacklevel=2,
        )
        return False
    return True


def _has_tensor_cores(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def take(rows: Tensor, cols: Tensor) -> bool:
    """Whether kernels take the product of rows [B, G, T, R] and cols [B, G, T, C]; else it is torch's."""
    return (
        rows.dtype == cols.dtype
        and rows.dtype in _HALF
        and min(*rows.shape[2:], cols.shape[3]) >= _SMALLEST
        and rows.shape[0] * rows.shape[1] > 0
        and run_on(rows.device)
    )


def supports_ghost_norm(BG: int, T: int) -> bool:
    """Whether the ghost norm of a product that kernels take is theirs, with BG samples times groups."""
    return BG * triangle(T, ghost_tile(BG, T)) >= _MANY


def ghost_tile(BG: int, T: int) -> int:
    """Positions on the side of a tile of the Gram matrices: large ones are read less often, small ones are many."""
    return 128 if T >= 256 and BG * triangle(T, 128) >= _MANY else tile(T, 64)


def triangle(T: int, tile: int) -> int:
    """Tiles of a symmetric matrix [T, T] on the diagonal and on one side of it."""
    n = -(-T // tile)
    return n * (n + 1) // 2


def gradient_tile(BG: int, R: int, C: int) -> tuple[int, int]:
    """Rows and columns of a tile of BG gradients [R, C]."""
    largest = 128 if BG * -(-R // 128) * -(-C // 128) >= _MANY else 64
    return tile(R, largest), tile(C, largest)


def tile(n: int, most: int) -> int:
    """The power of two that covers n, between 16 and `most`."""
    return min(most, max(_SMALLEST, 1 << (n - 1).bit_length()))
