"""The choice of kernels: it depends only on the device, dtypes and sizes."""

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
"""Least number of positions, rows or columns for tensor cores; fewer would be padded with zeros."""

_MANY = 128
"""Number of programs that keep a GPU busy, about. With fewer tiles, torch is better: Gram matrices fit into the cache,
and it splits sums over long rows."""


def run_on(device: torch.device) -> bool:
    """Return True if kernels run on tensors of `device`."""
    if os.environ.get("DPSHARD_TRITON") == "0" or not _is_installed():
        return False
    return interpreted() if device.type == "cpu" else device.type == "cuda" and _runs(device)


def interpreted() -> bool:
    """Return True if Triton runs kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _runs(device: torch.device) -> bool:
    if not _has_tensor_cores(device):
        return False
    try:
        from dpshard.kernels.triton import common

        common.launch(device)
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"Triton cannot launch kernels on {device} ({type(error).__name__}: {error}). torch computes the "
            f"products instead, slower in half precision. Triton needs a C compiler; DPSHARD_TRITON=0 silences this "
            f"warning.",
            stacklevel=2,
        )
        return False
    return True


def _has_tensor_cores(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def supports_product(rows: Tensor, cols: Tensor) -> bool:
    """Return True if kernels, not torch, multiply rows [B, G, T, R] and cols [B, G, T, C]."""
    return (
        rows.dtype == cols.dtype
        and rows.dtype in _HALF
        and min(*rows.shape[2:], cols.shape[3]) >= _SMALLEST
        and rows.shape[0] * rows.shape[1] > 0
        and run_on(rows.device)
    )


def supports_ghost_norm(BG: int, T: int) -> bool:
    """Return True if kernels compute the ghost norm of a supported product; BG: samples times groups."""
    return BG * triangle(T, ghost_tile(BG, T)) >= _MANY


def ghost_tile(BG: int, T: int) -> int:
    """Positions on the side of a tile of the Gram matrices: large tiles are read less often."""
    return 128 if T >= 256 and BG * triangle(T, 128) >= _MANY else tile(T, 64)


def triangle(T: int, tile: int) -> int:
    """Count tiles of a symmetric matrix [T, T] on and below the diagonal."""
    n = -(-T // tile)
    return n * (n + 1) // 2


def gradient_tile(BG: int, R: int, C: int) -> tuple[int, int]:
    """Rows and columns of a tile of BG gradients [R, C]."""
    largest = 128 if BG * -(-R // 128) * -(-C // 128) >= _MANY else 64
    return tile(R, largest), tile(C, largest)


def tile(n: int, most: int) -> int:
    """Power of two that covers n, between 16 and `most`."""
    return min(most, max(_SMALLEST, 1 << (n - 1).bit_length()))
