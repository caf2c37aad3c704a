"""Released steps, the number of copies of each, and the cost of the copies.

[Note: Copies of a step share their batch]
A sample is in all batches of the k releases of a step or in none. It moves k sums with independent noise by at most R
each. So they cost one release with the same sampling and noise multiplier sigma / sqrt(k). Discrete noise counts k
times as many elements. Steps may lie between the copies (Vadhan and Zhang 2023, arXiv:2207.08335).

A script that feeds its own batches may draw another one for a copy. Then the copies fall into groups with a batch each,
the i-th largest of at most k / i copies. So k copies are charged as groups of k, k // 2, ..., k // k copies.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpshard.accounting.releases import Release
from dpshard.errors import AccountingError


@dataclass(slots=True)
class Span:
    """Consecutive steps of a run, each released once; further copies are further spans."""

    run: str
    """Identity of the run; other runs share no batch."""
    start: int
    stop: int
    release: Release
    unverified_sampling: bool
    """True if the script drew the batches."""

    def covers(self, run: str, step: int) -> bool:
        """Return True if `step` of `run` is one of these."""
        return self.run == run and self.start <= step < self.stop

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, state: Any) -> Span:
        """Parse a `state_dict()`; raises KeyError, TypeError, ValueError or ConfigurationError."""
        fields = dict(state)
        span = cls(**{**fields, "release": Release(**fields["release"])})
        if not (type(span.start) is int and type(span.stop) is int and 0 <= span.start < span.stop):
            raise ValueError(f"a span has the steps [{span.start!r}, {span.stop!r})")
        if type(span.run) is not str or type(span.unverified_sampling) is not bool:
            raise ValueError(f"a span of run {span.run!r}, unverified {span.unverified_sampling!r}")
        return span


def append(
    spans: list[Span], run: str, step: int, release: Release, *, unverified_sampling: bool, follows: bool = True
) -> None:
    """Add a release to `spans`; `follows`: it may be part of the last span."""
    last = spans[-1] if spans else None
    facts = (run, step, release, unverified_sampling)
    if follows and last is not None and facts == (last.run, last.stop, last.release, last.unverified_sampling):
        last.stop += 1
    else:
        spans.append(Span(run, step, step + 1, release, unverified_sampling))


def cost(copies: Iterable[Span]) -> Counter[Release]:
    """Return the releases that all `copies` of one step cost. Raises AccountingError if their releases differ."""
    copies = list(copies)
    if not copies:
        return Counter()
    if any(span.release != copies[0].release for span in copies):
        raise AccountingError(
            f"A step was released as {copies[0].release}, and as another release: no bound covers both on one "
            f"batch. Repeat steps with the original noise, batch size and sample size."
        )
    release, k = copies[0].release, len(copies)
    fed = any(span.unverified_sampling for span in copies)
    return Counter(_together(release, k // group) for group in range(1, (k if fed else 1) + 1))


def _together(release: Release, k: int) -> Release:
    if k == 1:
        return release
    elements = release.discretized_elements
    return replace(
        release,
        noise_multiplier=release.noise_multiplier / math.sqrt(k),
        discretized_elements=None if elements is None else k * elements,
    )


def by_run(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Return the spans of each run."""
    runs: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        runs[span.run].append(span)
    return runs.values()


def total_cost(spans: Iterable[Span]) -> Counter[Release]:
    """Return the releases that all `spans` cost."""
    total: Counter[Release] = Counter()
    for of_run in by_run(spans):
        marks = sorted({step for span in of_run for step in (span.start, span.stop)})
        ahead, here = sorted(of_run, key=lambda span: span.start, reverse=True), []
        for start, stop in itertools.pairwise(marks):
            here = [span for span in here if span.stop > start]
            while ahead and ahead[-1].start == start:
                here.append(ahead.pop())
            for release, count in cost(here).items():
                total[release] += count * (stop - start)
    return total


def first_missing(spans: Iterable[Span], run: str, steps: int) -> int | None:
    """Return the number, from 1, of the first step of `run` without a release, or None. The run has `steps` steps."""
    reached = 0
    for span in sorted((span for span in spans if span.run == run), key=lambda span: span.start):
        if span.start <= reached:
            reached = max(reached, span.stop)
    return reached + 1 if reached < steps else None
