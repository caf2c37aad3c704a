"""Compiled C for the CPU, where numpy leaves much to gain; numpy does the same wherever it was not built.

[Note: Native code]
Noise is most of what a private step costs above the ordinary one where norms are cheap, and Box and Muller's method in
numpy is most of noise: seven passes over the cache. Compiled, it is one pass of vector code (normals.c). Random bits
still come from OpenSSL's cipher: no cryptography is of our own.

Threads are those of torch: a pool of another kind would compete with them for the cores, on which OpenMP's threads wait
for more work for milliseconds after the last operator. GOMP_parallel is what compilers call for `#pragma omp parallel`,
and torch's build for Linux brings the library that has it; where it is not found, one thread does the work.

setuptools builds it with the package if there is a C compiler, and goes on without if there is none. What is drawn does
not depend on it but for the last bits of a logarithm or a cosine. DPSHARD_NATIVE=0 switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_INTERFACE = 1
"""The way in which the library is called; see dpshard_interface() in normals.c."""


def is_built() -> bool:
    """Whether compiled code serves in this process."""
    return _library() is not None


def box_muller(words: NDArray[np.int32], normals: NDArray[Any]) -> bool:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    Units are contiguous, and `normals` altogether. What words mean, randomness.py says. False if nothing is built.
    """
    library = _library()
    if library is None:
        return False
    units, _, n = words.shape
    stride = words.strides[0] // words.itemsize
    library.dpshard_normals(*_team(), words.ctypes.data, stride, normals.ctypes.data, units, n, _wide(normals))
    return True


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> bool:
    """Turn `x` [n] into (x + std * noise) / divisor in place; the sum with wider noise is rounded once.

    Both are contiguous, float32 or float64, the noise not narrower. False if nothing is built.
    """
    library = _library()
    if library is None:
        return False
    library.dpshard_release(*_team(), x.ctypes.data, noise.ctypes.data, len(x), std, divisor, _wide(x), _wide(noise))
    return True


def _wide(x: NDArray[Any]) -> bool:
    return x.dtype == np.float64


def _team() -> tuple[int | None, int]:
    """Address of what runs a function on torch's threads, if there is any; and their number."""
    return _gomp_parallel(), torch.get_num_threads()


@functools.cache
def _gomp_parallel() -> int | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(function, ctypes.c_void_p).value if function else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("DPSHARD_NATIVE") == "0" or sys.byteorder != "little":
        return None
    found = find_spec("dpshard.native._normals")
    return None if found is None or found.origin is None else _load(found.origin)


def _load(path: str) -> ctypes.CDLL | None:
    """The library at `path`; None, with a warning, if it is not one that these functions call, or computes wrongly."""
    try:
        library = ctypes.CDLL(path)
        if library.dpshard_interface() != _INTERFACE:
            raise AttributeError("dpshard_interface")
        pointer, size, real, flag = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_double, ctypes.c_int
        team = (pointer, ctypes.c_uint)
        library.dpshard_normals.argtypes = (*team, pointer, size, pointer, size, size, flag)
        library.dpshard_release.argtypes = (*team, pointer, pointer, size, real, real, flag, flag)
        library.dpshard_normals.restype = library.dpshard_release.restype = None
        _try_out(library)
    except (OSError, AttributeError, ArithmeticError) as error:
        warnings.warn(
            f"{path} was not built from this version's source ({error}), so numpy draws the noise, more slowly. "
            f"Install dpshard again; DPSHARD_NATIVE=0 silences this warning.",
            stacklevel=2,
        )
        return None
    return library


def _try_out(library: ctypes.CDLL) -> None:
    """Raise ArithmeticError if a sum is released otherwise than numpy would: a faulty build must not drop the noise."""
    n = 100
    for kind, noise_kind in ((np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)):
        rows = 3 if noise_kind == np.float32 else 4
        words = (np.arange(rows * n, dtype=np.int64) * 2654435761 % 2**32).astype(np.uint32).view(np.int32)
        noise, x = np.empty(2 * n, noise_kind), np.linspace(-1, 1, 2 * n, dtype=kind)
        coarse, fine, angle = words.reshape(rows, n)[:3].astype(np.float64)
        uniform = (coarse % 2**31 + (fine % 2**31 + 0.5) * 2.0**-31) * 2.0**-31
        radius, angle = np.sqrt(-2 * np.log(uniform)), angle * np.pi * 2.0**-31
        expected = (x + 3.0 * np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))) / 7.0
        library.dpshard_normals(None, 1, words.ctypes.data, 0, noise.ctypes.data, 1, n, _wide(noise))
        library.dpshard_release(None, 1, x.ctypes.data, noise.ctypes.data, 2 * n, 3.0, 7.0, _wide(x), _wide(noise))
        if not np.allclose(x, expected, rtol=0, atol=1e-5):
            raise ArithmeticError("it computes wrongly")
