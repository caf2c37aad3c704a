"""Batches in a fixed order, and from groups that take turns: the sampling of correlated noise.

[Note: A cyclic order]
Step t takes the next B positions of an order that repeats after N. A sample comes again after at least floor(N / B)
steps, because floor((p + N) / B) - floor(p / B) >= floor(N / B). The accountant relies on this. The order is a keyed
permutation, because data sets are often sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpshard.randomness import RandomSource, derive_key
from dpshard.sampling.plans import bernoulli_indices

ROUNDS = 6
"""Rounds of the permutation. A change would change the order of every run."""


@dataclass(frozen=True)
class FixedOrderSampler:
    """Batches of exactly B samples; see [Note: A cyclic order]."""

    sample_size: int
    batch_size: int
    secret: bytes = field(repr=False)

    def draw(self, step: int) -> NDArray[np.int64]:
        """Return the indices [B] of `step`, in time O(B)."""
        positions = (step * self.batch_size + np.arange(self.batch_size)) % self.sample_size
        return self._permuted(positions)

    def _permuted(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `positions`.

        A Feistel network permutes 4^h >= N numbers; numbers >= N are permuted again.
        Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
        """
        half = np.uint64(max(1, -(-(self.sample_size - 1).bit_length() // 2)))
        keys = RandomSource(derive_key(self.secret, "order")).words(ROUNDS)
        samples = positions.astype(np.uint64)
        outside = np.ones(len(samples), bool)
        while outside.any():
            samples[outside] = _feistel(samples[outside], half, keys)
            outside = samples >= self.sample_size
        return samples.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half | right


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits by the finaliser of Steele et al. 2014, "Fast splittable pseudorandom number generators"."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@dataclass(frozen=True)
class CyclicPoissonSampler:
    """Poisson batches of the samples t, t + b, t + 2 b, ... at step t."""

    sample_size: int
    batch_size: int
    """Expected samples B of a batch."""
    groups: int
    secret: bytes = field(repr=False)

    def draw(self, step: int) -> NDArray[np.int64]:
        """Return the sorted distinct indices [n] of `step`, each with probability b B / N, in O(B)."""
        group = step % self.groups
        source = RandomSource(derive_key(self.secret, "sample", step))
        probability = min(1.0, self.groups * self.batch_size / self.sample_size)
        members = len(range(group, self.sample_size, self.groups))
        return group + self.groups * bernoulli_indices(members, probability, source.uniform)
