"""Noise as if all sums had the same bits: for tests that compare trainings whose sums differ by rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from dpshard.randomness import derive_key


@contextmanager
def taken_for_equal() -> Iterator[None]:
    """Give all sums one digest: the noise depends on secret, step, deviation, parameter and element alone."""
    with mock.patch("dpshard.noise.digest.SumDigest.part", return_value=torch.zeros(2, dtype=torch.int64)):
        yield


def noise_secret(secret: bytes, step: int, std: float) -> bytes:
    """The secret of the noise of a step, in a run with `secret`, of sums that are taken for equal."""
    return derive_key(secret, "sums", step, 0, 0, std.hex())
