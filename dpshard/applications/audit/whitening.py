"""The independent noise behind correlated noise."""

from __future__ import annotations

from collections import deque

from dpshard.applications.audit.noise import Noise
from dpshard.noise.correlation import BandedInverse, BandMF


class Whitening:
    """Undoes a correlation, step by step.

    Released noise n_t is z_t + w_1 z_{t-1} + ...; in a BandMF, z_t = n_t + c_1 n_{t-1} + ... has fewer terms.
    """

    def __init__(self, correlation: BandedInverse | BandMF, steps: int) -> None:
        self._of_noise = isinstance(correlation, BandedInverse)
        weights = correlation.noising(steps) if self._of_noise else correlation.strategy(steps)
        self._weights = weights[: correlation.bands]
        self._earlier: deque[Noise] = deque(maxlen=len(self._weights) - 1)

    @property
    def is_plain(self) -> bool:
        """True if the noise is independent already."""
        return len(self._weights) == 1

    def independent(self, noise: Noise) -> Noise:
        """Return the z of the next step."""
        sign = -1.0 if self._of_noise else 1.0
        found = dict(noise)
        for weight, earlier in zip(self._weights[1:], reversed(self._earlier), strict=False):
            found = {name: z + sign * weight * earlier[name] for name, z in found.items()}
        self._earlier.append(found if self._of_noise else noise)
        return found
