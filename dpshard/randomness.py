"""Keyed randomness: every draw is a function of the run secret and its purpose, never of global seeds.

A run owns one secret of 32 bytes from the operating system. Each purpose has a derived key: the noise of block 3 of
"head.weight" at step 7, the batch of step 7. So draws are independent, and a repeated step draws the same batch on any
number of ranks.

[Note: Strength]
HMAC-SHA-256 makes the keys, so a key reveals nothing about another key or the secret. AES-256 in counter mode expands a
key to bits indistinguishable from random ones. (GCM, NIST SP 800-38D, without its tag: OpenSSL runs it 2.5 times as
fast. Beyond 2^36 bytes per key it raises.) Box-Muller makes normals; 62 bits of radius reach 9.3 standard deviations.
[Note: Secure noise] in noise/keyed.py treats the floating-point side channel. `torch.Generator` is too weak on the CPU:
its 32-bit seeds can be enumerated.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import operator
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpshard.errors import ConfigurationError
from dpshard.kernels import native

SECRET_BYTES = 32


def new_run_secret() -> bytes:
    """Return 32 fresh bytes from the operating system; they reveal the noise."""
    return os.urandom(SECRET_BYTES)


def derive_key(secret: bytes, *context: str | int) -> bytes:
    """Return the key of 32 bytes for the purpose `context`: HMAC-SHA-256 under `secret`.

    Type and length make the encoding unique: ("a", "b") differs from ("ab",), 1 from "1". Raises ConfigurationError for
    a secret of the wrong length.
    """
    _require_secret(secret)
    return hmac.digest(secret, b"".join(map(_encode, context)), "sha256")


def derive_keys(secret: bytes, context: Sequence[str | int], endings: Iterable[Sequence[str | int]]) -> list[bytes]:
    """Return derive_key(secret, *context, *ending) for each of `endings`, faster."""
    _require_secret(secret)
    begin = b"".join(map(_encode, context))
    return [hmac.digest(secret, begin + _encode_all(*ending), "sha256") for ending in endings]


def derive_each(secrets: Iterable[bytes], *context: str | int) -> list[bytes]:
    """Return derive_key(secret, *context) for each of `secrets`, which are keys, faster."""
    message = _encode_all(*context)
    return [hmac.digest(secret, message, "sha256") for secret in secrets]


def _require_secret(secret: bytes) -> None:
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(
            f"A run secret has {SECRET_BYTES} bytes, got {len(secret)}: make one with new_run_secret()."
        )


@functools.lru_cache(maxsize=2**16, typed=True)
def _encode_all(*parts: str | int) -> bytes:
    return b"".join(map(_encode, parts))


@functools.lru_cache(maxsize=2**12, typed=True)  # no secrets
def _encode(part: str | int) -> bytes:
    kind, text = (b"s", part) if isinstance(part, str) else (b"i", str(int(operator.index(part))))
    data = text.encode()
    return kind + len(data).to_bytes(8, "little") + data


def host_states() -> tuple[Any, Any, Any]:
    """Return the states of the global generators of torch (on the CPU), NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # models and data use them


def restore_host(states: Iterable[Any]) -> None:
    """Restore `host_states()`."""
    of_torch, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_python)


class RandomSource:
    """The stream of random numbers under `key` (32 bytes); see [Note: Strength].

    The first k of n values of a fresh source do not depend on n.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # late: loading it takes 0.1 s

        self._stream = Cipher(algorithms.AES256(key), modes.GCM(_NONCE)).encryptor()

    def words(self, n: int) -> NDArray[np.uint64]:
        """Return `n` words of 64 random bits."""
        return self._fill(np.empty(8 * n + _CIPHER_PADDING, np.uint8)).view("<u8")

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` uniforms in (0, 1], multiples of 2**-53; their logarithms are finite."""
        return ((self.words(n) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normals(self, n: int, dtype: type[np.float32] | type[np.float64]) -> Iterator[NDArray[Any]]:
        """Yield `n` standard normals in pieces that fit the cache; each overwrites the one before."""
        rows, drawn = _WORDS[dtype], 0
        with _scratch(min(_UNITS * UNIT, -(-n // UNIT) * UNIT), dtype) as (normals, words, raw):
            while drawn < n:
                units = min(_UNITS, -(-(n - drawn) // UNIT))
                size = units * UNIT
                integers = self._fill(raw[: 2 * rows * size + _CIPHER_PADDING]).view("<i4").reshape(units, rows, -1)
                made = normals[:size].reshape(units, 2, -1)
                native.box_muller(integers, made, words[: integers.size].reshape(rows, units, -1))
                yield normals[: min(size, n - drawn)]
                drawn += size

    def _fill(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        n = len(buffer) - _CIPHER_PADDING
        for start in range(0, n, len(_ZEROS)):
            self._stream.update_into(_ZEROS[: n - start], buffer[start:].data)
        return buffer[:n]


UNIT = 2**14
"""Normals per stretch of the stream; a change would change all draws."""
_UNITS = 2**4
"""Units per call; more do not fit the cache."""

_WORDS: dict[Any, int] = {np.float32: 3, np.float64: 4}
"""32-bit words for a pair of normals."""

_FREE_SCRATCH: list[NDArray[np.uint8]] = []
"""Allocating for many small tensors takes longer than drawing."""


@contextmanager
def _scratch(n: int, dtype: Any) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[np.uint8]]]:
    itemsize, words = np.dtype(dtype).itemsize, _WORDS[dtype] * n // 2
    cuts = tuple(itertools.accumulate((n * itemsize, words * itemsize, 4 * words + _CIPHER_PADDING)))
    try:
        scratch = _FREE_SCRATCH.pop()  # atomic: threads share the list
    except IndexError:
        scratch = np.empty(0, np.uint8)
    if len(scratch) < cuts[-1]:
        scratch = np.empty(cuts[-1], np.uint8)
    try:
        yield scratch[: cuts[0]].view(dtype), scratch[cuts[0] : cuts[1]].view(dtype), scratch[cuts[1] : cuts[2]]
    finally:
        _FREE_SCRATCH.append(scratch)


_NONCE = bytes(12)
_ZEROS = memoryview(bytes(8 * UNIT * _UNITS))
_CIPHER_PADDING = 16
"""Bytes that a block cipher may write beyond its message."""
