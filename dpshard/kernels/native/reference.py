"""The compiled functions in numpy, for noise without a build, and as references for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpshard.kernels.underflow import hidden

_SCALES = (2.0**-31, 2.0**-62, math.pi * 2.0**-31, math.pi * 2.0**-63)
"""Scales of the words: two for the radius, then two for the angle."""


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` from random words as normals.box_muller; overwrite `words`."""
    words[:, :2] &= 2**31 - 1
    kind = normals.dtype.type
    scales = np.array(_SCALES[: len(scratch)], kind)[:, None, None]
    np.multiply(words.swapaxes(0, 1), scales, out=scratch, dtype=kind, casting="same_kind")
    radius, fine, angle, *finer = scratch
    # u = (w + (w' + 1/2) 2^-31) 2^-31 in (0, 1]: tails come from u near 0, where all bits count.
    fine += kind(2.0**-63)
    radius += fine
    np.log(radius, out=radius)
    radius *= kind(-2)
    np.sqrt(radius, out=radius)
    for word in finer:
        angle += word
    np.cos(angle, out=normals[:, 0])
    np.sin(angle, out=normals[:, 1])
    normals *= radius[:, None]


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Add noise to `x` and divide it, in place, as normals.release_; overwrite `noise`."""
    noise *= std
    np.add(noise, x, out=x, casting="same_kind")
    x /= divisor


def streams(keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    """Return the first bytes, at least `sizes` of them, of randomness.RandomSource under each of `keys`."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # imported late, because loading it takes 0.1 s

    # Bytes of the stream, then the tag. An AESGCM object is made five times as fast as an object for the stream cipher.
    zeros = memoryview(bytes(max(sizes)))
    return [AESGCM(key).encrypt(bytes(12), zeros[:n], None) for key, n in zip(keys, sizes, strict=True)]


def release_piece_(
    x: NDArray[Any], streams: Sequence[bytes], half: int, lo: int, end: int, std: float, divisor: float, kind: Any
) -> None:
    """Release one piece of normals.release_pieces_."""
    rows, (first, last) = 3 if kind == np.float32 else 4, pairs_of(half, lo, end)
    summands = []
    for stream in streams:
        words = [np.frombuffer(stream, np.int32, last - first, 4 * (row * half + first)) for row in range(rows)]
        normals, made = np.empty((2, half), kind), np.empty((1, 2, last - first), kind)
        box_muller(np.stack(words)[None], made, np.empty((rows, 1, last - first), kind))
        normals[:, first:last] = made[0]
        summands.append(normals.reshape(-1)[lo:end])
    noise, *others = summands
    for other in others:
        noise += other
    release_(x, noise * len(streams) ** -0.5 if others else noise, std, divisor)


def pairs_of(half: int, lo: int, end: int) -> tuple[int, int]:
    """Return the pairs [first, last) that hold the normals [lo, end) of 2 * half."""
    if lo < half < end:
        return 0, half
    return (lo, end) if end <= half else (lo - half, end - half)


def checksum(x: NDArray[Any]) -> int:
    """Return one term of sums.checksums."""
    words = x.reshape(-1).view(np.int16 if x.itemsize == 2 else np.int32).astype(np.int64)
    return (words + words * words).sum()


def digest(words: NDArray[Any], at: int, columns: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the terms [2] of digest.add_digests_."""
    padded = np.zeros((len(rows), columns.shape[1]), np.int64)
    padded.reshape(-1)[at : at + len(words)] = words
    return ((padded[:, None] * columns).sum(2) * rows).sum(0)


def floored_ghost_norm_sq(rows: NDArray[Any], cols: NDArray[Any], relative_floor: float) -> NDArray[np.float64]:
    """See gram.floored_ghost_norm_sq; float64, with float32's underflow."""
    of_rows, of_cols = (_gram(x) for x in (rows, cols))
    product = of_rows * of_cols
    scale = np.sqrt(product.diagonal(axis1=2, axis2=3)).sum(2)
    return np.maximum(product.sum((2, 3)), relative_floor * np.square(scale)).sum(1)


def _gram(x: NDArray[Any]) -> NDArray[np.float64]:
    return x.astype(np.float64) @ x.swapaxes(2, 3) + hidden(x[0, 0].size, torch.float32) * np.eye(x.shape[2])


def convolution_gradients(
    input: NDArray[Any],
    gradient: NDArray[Any],
    kernel: tuple[int, int, int],
    stride: tuple[int, int, int],
    dilation: tuple[int, int, int],
) -> NDArray[np.float64]:
    """Return [B, G, R, C, *kernel], given input [B, k, G, C, *space], padded, and gradient [B, k, G, R, *positions]."""
    positions = gradient.shape[4:]
    out = np.empty((*gradient.shape[:1], *gradient.shape[2:4], input.shape[3], *kernel))
    for at in np.ndindex(*kernel):
        seen = tuple(
            slice(d * i, d * i + s * (n - 1) + 1, s) for i, n, s, d in zip(at, positions, stride, dilation, strict=True)
        )
        of_window = input[(..., *seen)]
        out[(..., *at)] = np.einsum("bkgrzyx,bkgczyx->bgrc", gradient, of_window, dtype=np.float64)
    return out


def normalization_gradients(
    x: NDArray[Any], gradient: NDArray[Any], groups: int, eps: float, centered: bool
) -> NDArray[np.float64]:
    """Return per-sample gradients, float64, as normalization.normalization_gradients."""
    wide = x.astype(np.float64)
    rows = wide.reshape(len(x), groups, -1) if groups else wide
    rows = rows - rows.mean(2, keepdims=True) if centered else rows
    normalized = (rows / np.sqrt(np.square(rows).mean(2, keepdims=True) + eps)).reshape(x.shape)
    return np.stack([(gradient * normalized).sum(2 if groups else 1), gradient.sum(2 if groups else 1, dtype=float)])
