"""Random allocation (balls in bins): every sample is in one random step of each epoch.

Every sample draws its step independently and uniformly; the accountant relies on exactly this. The step is a function
of run secret, epoch and sample. The first step of an epoch draws and sorts all N samples, in O(N) time and 10 N bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpshard.randomness import RandomSource, derive_key

_DRAWN_AT_ONCE = 2**20
"""Samples whose random words are in memory at once."""


@dataclass(frozen=True)
class AllocationSampler:
    """The logical batch of every step, as a function of secret and step."""

    sample_size: int
    epoch_steps: int
    secret: bytes = field(repr=False)
    one_draw: bool = False
    """True if a sample is in the same step of every epoch."""
    _drawn: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=dict, repr=False)

    def draw(self, step: int) -> NDArray[np.int64]:
        """Return the sorted distinct indices [n] of the logical batch of `step`."""
        epoch, place = divmod(step, self.epoch_steps)
        epoch = 0 if self.one_draw else epoch
        if epoch not in self._drawn:
            self._drawn.clear()
            self._drawn[epoch] = self._sorted(epoch)
        samples, starts = self._drawn[epoch]
        return samples[starts[place] : starts[place + 1]]

    def _sorted(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples [N] sorted by step, and the start of each step [epoch_steps + 1]."""
        source = RandomSource(derive_key(self.secret, "allocation", epoch))
        steps = np.empty(self.sample_size, np.uint16 if self.epoch_steps <= 2**16 else np.uint32)
        for start in range(0, self.sample_size, _DRAWN_AT_ONCE):
            part = steps[start : start + _DRAWN_AT_ONCE]
            # Words of 64 bits: the probabilities of steps differ by about epoch_steps / 2^64, relatively.
            part[:] = source.words(len(part)) % np.uint64(self.epoch_steps)
        ends = np.cumsum(np.bincount(steps, minlength=self.epoch_steps))
        return np.argsort(steps, kind="stable"), np.concatenate([[0], ends])
