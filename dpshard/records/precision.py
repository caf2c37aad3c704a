"""IEEE products of float32 in norms and clipped sums.

[Note: Why not TF32]
A clip coefficient bounds a contribution only if the norm and the clipped sum round alike. TF32 keeps 10 bits of each
factor, but numerics.py assumes 23. A sample with positions that cancel could contribute several thresholds. Forward and
backward keep the user's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# The properties of torch.backends take ten times as long.
_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
_EXACT = ("none", "ieee")


def exact_products(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with IEEE matrix products of float32."""
    return _exact(device, "matmul", _legacy_matmul)


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """Enter a block with IEEE convolutions of float32, which give the same bits in every run."""
    with _exact(device, "conv", _legacy_convolution), _repeatable() if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def _repeatable() -> Iterator[None]:
    # Other bits in a repeated step would make a second release of it. Timing chooses other algorithms in other runs.
    before = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_deterministic(True)
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_deterministic(before[0])
        torch._C._set_cudnn_benchmark(before[1])


def _exact(device: torch.device, operation: str, legacy: Callable[[], Any]) -> AbstractContextManager[Any]:
    backend = _BACKENDS.get(device.type)
    if backend is None or _precision(backend, operation) in _EXACT:
        return nullcontext()
    return _switched(backend, operation, legacy)


@contextmanager
def _switched(backend: str, operation: str, legacy: Callable[[], Any]) -> Iterator[None]:
    # Kernels of torch raise if the older switch disagrees with the newer one; the older one sets both.
    before = {key: _precision(*key) for key in _touched(operation)}
    restore = legacy() if backend == "cuda" else None
    torch._C._set_fp32_precision_setter(backend, operation, "ieee")
    try:
        yield
    finally:
        if restore is not None:
            restore()
        for key, value in before.items():
            torch._C._set_fp32_precision_setter(*key, value)


def _touched(operation: str) -> tuple[tuple[str, str], ...]:
    if operation == "matmul":
        return ("cuda", "matmul"), ("mkldnn", "matmul")
    return ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv")


def _legacy_matmul() -> Callable[[], None] | None:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user set only the newer switch
        return None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _legacy_convolution() -> Callable[[], None] | None:
    try:
        before = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return None
    torch._C._set_cudnn_allow_tf32(False)
    return lambda: torch._C._set_cudnn_allow_tf32(before)
