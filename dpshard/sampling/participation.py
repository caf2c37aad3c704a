"""The last step of every sample, by fingerprints, for batches that the engine does not draw.

[Note: Participation] A stream, or a loop of the user's own, has no index. So a hash of 64 bits of its content
identifies a sample. (By chance, two of 10^7 agree with probability 3e-6; then a run is refused.) Before a release,
every fingerprint of its logical batch, over all ranks, must be unique. It must be new, or `separation` or more steps
old. There are at most N. In the first epoch, a repeated sample that was changed is not detected.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpshard.errors import CheckpointError, DataError

Fingerprints = NDArray[np.int64]

_REMEDY = (
    "Keep one order (shuffle=False, or shuffle once and store the order), leave out rows that are equal, and change "
    "samples at random only after they are read. Or pass a map-style data set to engine.batches, which identifies "
    "samples by their index."
)


class Participation:
    """The last step of every sample of a run."""

    def __init__(self, sample_size: int, separation: int) -> None:
        self._sample_size, self._separation = sample_size, separation
        self._last: dict[int, int] = {}
        self._begun: tuple[int, Fingerprints] | None = None

    @property
    def begun(self) -> bool:
        """True if a checked batch is not released yet."""
        return self._begun is not None

    def begin(self, step: int, batch: Fingerprints) -> None:
        """Check the fingerprints of the logical batch of `step`, over all ranks; `end` adds them.

        Raises DataError for a sample that comes twice, or too early.
        """
        self.drop()
        samples = batch.tolist()
        if len(set(samples)) < len(samples):
            raise DataError(
                f"Step {step + 1} has {len(samples)} samples, and {len(samples) - len(set(samples))} of them are equal "
                f"to others in it. Epsilon does not cover a sample that counts twice. On several ranks, each must "
                f"read other samples, as with DistributedSampler(shuffle=False, drop_last=True). {_REMEDY}"
            )
        never = -self._separation
        latest = max((self._last.get(sample, never) for sample in samples), default=never)
        if step - latest < self._separation:
            raise DataError(
                f"A sample of step {step + 1} was in step {latest + 1}, too: sampling='fixed-order' requires at least "
                f"{self._separation} steps between them (sample_size // batch_size). {_REMEDY}"
            )
        new = sum(sample not in self._last for sample in samples)
        if len(self._last) + new > self._sample_size:
            raise DataError(
                f"Step {step + 1} brings more different samples than sample_size={self._sample_size}. So it is unknown "
                f"which of them came before: the samples change from epoch to epoch, or there are more. {_REMEDY}"
            )
        self._begun = step, batch

    def drop(self) -> None:
        """Forget the batch that was begun."""
        self._begun = None

    def end(self, step: int) -> None:
        """Add the samples of `step`, which is released, if they are known."""
        if self._begun is not None and self._begun[0] == step:
            self._last.update(dict.fromkeys(self._begun[1].tolist(), step))
        self._begun = None

    def state_dict(self) -> dict[str, str] | None:
        """Return the last steps as plain JSON, or None before any."""
        if not self._last:
            return None
        samples = np.fromiter(self._last.keys(), "<i8", len(self._last))
        steps = np.fromiter(self._last.values(), "<u4", len(self._last))
        return {"samples": _text(samples), "steps": _text(steps)}

    def load_state_dict(self, state: Mapping[str, str] | None) -> None:
        """Load a `state_dict()`. If it is damaged, raise CheckpointError and change nothing."""
        try:
            samples, steps = (
                ([], []) if state is None else (_array(state["samples"], "<i8"), _array(state["steps"], "<u4"))
            )
            last = dict(zip(samples, steps, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The participation of samples in the checkpoint is damaged ({error}): a sample might come too early. "
                f"Resume from an older checkpoint."
            ) from error
        self._last, self._begun = last, None


def _text(x: NDArray[Any]) -> str:
    return base64.b64encode(x.tobytes()).decode()


def _array(text: str, dtype: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist()
