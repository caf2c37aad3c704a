"""The choice of kernels: it depends only on the device, dtypes and sizes.

Before their first use on a device, kernels are compared with torch. If one differs, torch replaces the kernels of its
kind.
"""

from __future__ import annotations

import functools
import os
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dpshard.kernels.triton import tiles

_HALF = (torch.bfloat16, torch.float16)


def run_on(device: torch.device) -> bool:
    """Return True if kernels run on `device`."""
    if os.environ.get("DPSHARD_TRITON") == "0" or not _is_installed():
        return False
    return interpreted() if device.type == "cpu" else device.type == "cuda" and _runs(device)


def interpreted() -> bool:
    """Return True if Triton interprets kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _runs(device: torch.device) -> bool:
    if not _has_tensor_cores(device):
        return False
    return _passes(device, lambda self_test: self_test.wrong_noise(device))


@functools.cache
def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    return interpreted() or _passes(device, lambda self_test: self_test.wrong_product(device, dtype))


@functools.cache
def _adds_rows(device: torch.device) -> bool:
    return interpreted() or _passes(device, lambda self_test: self_test.wrong_rows(device))


@functools.cache
def _adds_digests(device: torch.device) -> bool:
    return interpreted() or _passes(device, lambda self_test: self_test.wrong_digest(device))


def self_tests(device: torch.device) -> dict[str, Callable[[], bool]]:
    """Return by group of kernels a function that tells if `device` uses them; it may warn. Only GPUs test kernels."""
    on_gpu = device.type == "cuda"
    return {
        "noise": lambda: on_gpu and run_on(device),
        "rows": lambda: on_gpu and run_on(device) and _adds_rows(device),
        "digest": lambda: on_gpu and run_on(device) and _adds_digests(device),
        "products in bfloat16": lambda: on_gpu and run_on(device) and _multiplies(device, torch.bfloat16),
        "products in float16": lambda: on_gpu and run_on(device) and _multiplies(device, torch.float16),
    }


def _passes(device: torch.device, find_wrong: Callable[[Any], str | None]) -> bool:
    """Return True if `find_wrong` finds no wrong kernel. Warn if it finds one, or if kernels cannot be launched."""
    try:
        with ThreadPoolExecutor(1) as thread:  # a new thread has none of the caller's torch modes, streams and settings
            wrong = thread.submit(_try_out, find_wrong).result()
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"Triton cannot launch kernels on {device} ({type(error).__name__}: {error}). torch computes the "
            f"products instead, slower in half precision. Triton needs a C compiler; DPSHARD_TRITON=0 silences this "
            f"warning.",
            stacklevel=2,
        )
        return False
    if wrong is None:
        return True
    warnings.warn(
        f"The Triton kernel {wrong} gives wrong results on {device}, so torch replaces it. Please report "
        f"this with the output of `dpshard doctor`. DPSHARD_TRITON=0 silences this warning.",
        stacklevel=2,
    )
    return False


def _try_out(find_wrong: Callable[[Any], str | None]) -> str | None:
    from triton.errors import TritonError

    from dpshard.kernels.triton import self_test

    try:
        return find_wrong(self_test)
    except TritonError as error:  # Triton's errors derive from Exception only
        raise RuntimeError(str(error)) from error


def _has_tensor_cores(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def supports_product(rows: Tensor, cols: Tensor) -> bool:
    """Return True if kernels multiply rows [B, G, T, R] and cols [B, G, T, C]."""
    return (
        rows.dtype == cols.dtype
        and rows.dtype in _HALF
        and min(*rows.shape[2:], cols.shape[3]) >= tiles.SMALLEST
        and rows.shape[0] * rows.shape[1] > 0
        and run_on(rows.device)
        and _multiplies(rows.device, rows.dtype)
    )


def supports_ghost_norm(BG: int, T: int, length: int) -> bool:
    """Return True if kernels compute the ghost norm of a supported product.

    BG: samples times groups. `length`: rows and columns of the gradient. Torch takes some twenty launches instead.
    """
    return length <= tiles.LONGEST or BG * tiles.triangle(T, tiles.ghost_tile(BG, T)) >= tiles.MANY


def supports_rows(x: Tensor) -> bool:
    """Return True if kernels, not torch, add up rows of x [B, ...]."""
    return (
        x.dtype in (*_HALF, torch.float32) and min(x.shape, default=0) > 0 and run_on(x.device) and _adds_rows(x.device)
    )


def supports_row_norms(x: Tensor) -> bool:
    """Return True if a kernel takes the norms of rows of x [B, ...]. Only for short rows: one program takes a row."""
    return x.shape[1:].numel() <= tiles.LONGEST and supports_rows(x)


def supports_digest(device: torch.device) -> bool:
    """Return True if a kernel adds up digests on `device`."""
    return run_on(device) and _adds_digests(device)
