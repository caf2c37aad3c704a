"""Keyed randomness: every draw is a function of the run secret and of what it is for, never of global seeds.

[Note: Keyed draws]
A run owns one secret of 32 bytes from the operating system. A draw for a purpose (the noise of block 3 of
parameter "head.weight" at step 7; the batch of step 7) is generated under a key derived from the secret and the
purpose. So draws for different purposes are independent, a replayed step draws the same values, on however many
ranks, and `torch.manual_seed` in a training script neither predicts nor changes them.

[Note: Strength]
Keys come from HMAC-SHA-256, so no key tells anything about another, or about the secret. What a source makes of a key:
- the default, Philox4x64-10, is a counter generator under the first 128 bits of the key: excellent statistics, fast,
  but nobody claims that its output hides its key from a cryptanalyst. (`torch.Generator` on the CPU would not do: its
  mt19937 is seeded by 32 bits, few enough to try them all.)
- the secure one, SHAKE-256 over all 256 bits of the key, is a cryptographic stream, about ten times slower.
Neither closes the floating-point side channel of Mironov 2012, "On significance of the least significant bits".
"""

from __future__ import annotations

import hashlib
import hmac
import operator
import os
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpshard.errors import ConfigurationError

SECRET_BYTES = 32


class RandomSource(Protocol):
    """A stream of random numbers. Of a fresh source, the first k of n values asked for do not depend on n."""

    def uniform(self, n: int) -> NDArray[np.float64]:
        """`n` uniforms in (0, 1], multiples of 2**-53: a logarithm of them is finite."""
        ...

    def normal(self, n: int, dtype: type[np.float32] | type[np.float64]) -> NDArray[Any]:
        """`n` standard normals of `dtype`."""
        ...


def new_run_secret() -> bytes:
    """A fresh secret of 32 bytes from the operating system; whoever knows it can subtract the noise."""
    return os.urandom(SECRET_BYTES)


def derive_key(secret: bytes, *context: str | int) -> bytes:
    """Key of 32 bytes for the purpose `context`: HMAC-SHA-256 under `secret`.

    Each part is encoded with its type and length, so that two contexts have one encoding only if they are equal:
    ("a", "b") is not ("ab",), and 1 is not "1". Raises ConfigurationError for a secret of the wrong length.
    """
    if len(secret) != SECRET_BYTES:
        raise ConfigurationError(
            f"A run secret has {SECRET_BYTES} bytes, got {len(secret)}: make one with new_run_secret()."
        )
    return hmac.digest(secret, b"".join(_encode(part) for part in context), "sha256")


def random_source(key: bytes, *, secure: bool = False) -> RandomSource:
    """The stream under `key` (32 bytes, from `derive_key`): Philox, or SHAKE-256 if `secure`; see [Note: Strength]."""
    return _Shake(key) if secure else _Philox(key)


def _encode(part: str | int) -> bytes:
    kind, text = (b"s", part) if isinstance(part, str) else (b"i", str(int(operator.index(part))))
    data = text.encode()
    return kind + len(data).to_bytes(8, "little") + data


class _Philox:
    def __init__(self, key: bytes):
        # key=, not seed=: a seed would be hashed once more, and key= takes all 128 bits as they are.
        self._generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))

    def uniform(self, n: int) -> NDArray[np.float64]:
        return 1.0 - self._generator.random(n)

    def normal(self, n: int, dtype: type[np.float32] | type[np.float64]) -> NDArray[Any]:
        return self._generator.standard_normal(n, dtype)


class _Shake:
    def __init__(self, key: bytes):
        self._key = key
        self._calls = 0

    def uniform(self, n: int) -> NDArray[np.float64]:
        # hashlib squeezes a SHAKE state once, from its start: the number of the call gives each call a new stream.
        stream = hashlib.shake_256(self._key + self._calls.to_bytes(8, "little")).digest(8 * n)
        self._calls += 1
        return ((np.frombuffer(stream, dtype="<u8") >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normal(self, n: int, dtype: type[np.float32] | type[np.float64]) -> NDArray[Any]:
        """Box and Muller 1958: a pair of uniforms gives the radius and the angle of a pair of normals."""
        pairs_2 = self.uniform(n + n % 2).reshape(-1, 2)
        radius, angle = np.sqrt(-2.0 * np.log(pairs_2[:, 0])), 2.0 * np.pi * pairs_2[:, 1]
        normals_2 = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
        return normals_2.reshape(-1)[:n].astype(dtype, copy=False)
