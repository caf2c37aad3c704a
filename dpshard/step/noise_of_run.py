"""The noise of every release of a run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dpshard.accounting.mechanism import Mechanism
from dpshard.errors import CheckpointError
from dpshard.noise.buffers import BufferedGaussian, NoiseBuffers
from dpshard.noise.correlation import BandMF
from dpshard.noise.digest import SumDigest
from dpshard.noise.keyed import CorrelatedGaussian, KeyedDiscreteGaussian, KeyedGaussian, NoiseTerm
from dpshard.randomness import derive_key
from dpshard.step.chain import Chain

Sums = tuple[str | int, ...]


class StepNoise(NamedTuple):
    """The noise of one release."""

    identity: bytes
    noise: KeyedGaussian
    link: bytes
    """Key of the step in the run's chain; b"" without one."""
    scale: float
    """Deviation of the noise over that of the independent z."""


class NoiseOfRun:
    """The noise of each step, from run secret, step and sums. If a run is one release, earlier sums count, too."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        correlation, steps = mechanism.noise_correlation, mechanism.schedule.steps
        most = steps if isinstance(correlation, BandMF) else len(mechanism.noise_weights(steps - 1))
        self._digest: tuple[bytes, SumDigest] | None = None
        self._chain = None if mechanism.scheme is None else Chain(most - 1)
        self._buffers: NoiseBuffers | None = None
        if isinstance(correlation, BandMF) and correlation.buffers:
            self._buffers = NoiseBuffers(mechanism.correlation.strategy(steps)[: correlation.bands].tolist())

    def digest(self, secret: bytes) -> SumDigest:
        """Digest of sums under `secret`."""
        if self._digest is None or self._digest[0] != secret:
            self._digest = secret, SumDigest(secret)
        return self._digest[1]

    def of_step(self, secret: bytes, step: int, sums: Sums) -> StepNoise:
        """Noise of the next `step`."""
        secure = self._mechanism.secure
        if self._chain is None:
            kind = KeyedGaussian if self._mechanism.discretized_elements is None else KeyedDiscreteGaussian
            noise = kind(derive_key(secret, "sums", *sums), secure=secure)
            return StepNoise(derive_key(secret, "release", *sums)[:16], noise, b"", 1.0)
        weights = self._mechanism.noise_weights(step)
        if self._buffers is not None:
            link, identity = self._chain.next(secret, (*sums, "buffers"))
            path = (*reversed(self._chain.last(step)), link)
            return StepNoise(identity, BufferedGaussian(link, secure, path, self._buffers), link, math.hypot(*weights))
        link, identity = self._chain.next(secret, sums)
        links = [link, *self._chain.last(len(weights) - 1)]
        terms = tuple(NoiseTerm(w, key, step - j) for j, (w, key) in enumerate(zip(weights, links, strict=True)) if w)
        return StepNoise(identity, CorrelatedGaussian(link, secure, terms), link, math.hypot(*weights))

    def take(self, noise: StepNoise) -> None:
        """Go to the next step, after this noise's release was counted."""
        if self._chain is not None:
            self._chain.append(noise.link)

    def state_dict(self) -> list[str] | None:
        """Keys of past noise, if needed."""
        return None if self._chain is None else self._chain.state_dict()

    def load_state_dict(self, state: Any, step: int) -> None:
        """Load a `state_dict()` saved before `step`. If it is damaged, raise CheckpointError and change nothing."""
        if self._chain is not None:
            self._chain.load_state_dict(state, step)
        elif state is not None:
            raise CheckpointError(
                "The checkpoint has keys of past noise, but this run needs none. Resume from another checkpoint."
            )
