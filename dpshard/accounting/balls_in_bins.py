"""How the steps of a run with random allocation compose: an epoch is one release.

The first n sums of an epoch are a release of `allocated_steps` = n. k copies of a step move a coordinate by sqrt(k)
([Note: Copies of a step share their batch] in spans.py). Scaled down, with noise added, they stand for fewer copies. So
an epoch with at most k copies of a step costs at most sigma / sqrt(k).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from dpshard.accounting.releases import Release
from dpshard.accounting.spans import Span


@dataclass(frozen=True, slots=True)
class BallsInBins:
    """A SamplingScheme with a release per epoch."""

    release: Release
    steps: int
    open_ended: ClassVar[bool] = True

    @property
    def sensitivity(self) -> float:
        """Largest change of a sum by a sample with contributions of norm 1."""
        return 1.0

    def cost(self, spans: Iterable[Span]) -> Counter[Release]:
        """Return the releases that these steps cost together: one per epoch."""
        T, total, spans = self.release.epoch_steps, Counter[Release](), list(spans)
        if len(spans) == 1 and spans[0].start == 0:  # almost always
            whole, rest = divmod(spans[0].stop, T)
            total[self._of(T, 1)] += whole
            total[self._of(max(1, rest), 1)] += int(rest > 0)
            return +total
        for parts in _by_epoch(spans, T).values():
            changes = Counter[int]()
            for start, stop in parts:
                changes[start] += 1
                changes[stop] -= 1
            copies = max(itertools.accumulate(changes[step] for step in sorted(changes)))
            total[self._of(max(changes), copies)] += 1
        return total

    def _of(self, steps: int, copies: int) -> Release:
        sigma = self.release.noise_multiplier / math.sqrt(copies)
        share = steps / self.release.epoch_steps
        return replace(self.release, noise_multiplier=sigma, sampling_probability=share, allocated_steps=steps)

    def in_words(self, steps: int) -> str:
        """Describe the releases of `steps` steps."""
        T = self.release.epoch_steps
        return f"{steps} releases in epochs of {T}, with every sample in one random step of each (balls in bins)"


def _by_epoch(spans: Iterable[Span], T: int) -> dict[int, list[tuple[int, int]]]:
    """Return the parts of the spans in each epoch, as first and last step within it."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        for epoch in range(span.start // T, -(-span.stop // T)):
            found[epoch].append((max(span.start - epoch * T, 0), min(span.stop - epoch * T, T)))
    return found
