"""Products of float32 in IEEE arithmetic, where norms and clipped sums are computed.

[Note: Why not TF32]
A clip coefficient bounds a contribution only if the norm and the clipped sum round alike. TF32 keeps 10 bits of each
factor. The rounding floors of numerics.py assume 23. A sample whose positions cancel could then contribute several
thresholds. PyTorch multiplies convolutions in TF32 by default on GPUs, and matrices if the user asks for it
(`torch.set_float32_matmul_precision("high")`). CPUs have bfloat16 products in the same place. The user's own forward
and backward keep the precision that the user chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Queried for every record: the properties of torch.backends that wrap it take ten times as long.
_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
_EXACT = ("none", "ieee")


def exact_products(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which matrix products of float32 on `device` round as IEEE says."""
    return _exact(device, "matmul", _legacy_matmul)


def exact_convolutions(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which convolutions of float32 on `device` round as IEEE says."""
    return _exact(device, "conv", _legacy_convolution)


def _exact(device: torch.device, operation: str, legacy: Callable[[], Any]) -> AbstractContextManager[Any]:
    backend = _BACKENDS.get(device.type)
    if backend is None or _precision(backend, operation) in _EXACT:
        return nullcontext()
    return _switched(backend, operation, legacy)


@contextmanager
def _switched(backend: str, operation: str, legacy: Callable[[], Any]) -> Iterator[None]:
    # torch has an older switch beside the newer one, and its kernels raise if the two disagree. The older sets both.
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
    """Return the newer settings that the older switch of an operation sets as well."""
    if operation == "matmul":
        return ("cuda", "matmul"), ("mkldnn", "matmul")
    return ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv")


def _legacy_matmul() -> Callable[[], None] | None:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user set the newer switch only: then the older one is not asked either
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
