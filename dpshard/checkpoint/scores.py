"""Noisy scores on private validation samples: for early stopping, and to choose a checkpoint.

A score is the number of right answers on M validation samples plus Gaussian noise, over M. One sample moves the number
by at most 1. K scores, each with noise sqrt(K) sigma, cost exactly one Gaussian release of sigma, also adaptively.
Source: Dong et al. 2019, arXiv:1905.02383, Cor. 3.3. A training sample pays for the run, a validation sample for the
scores. A person with both pays both: then `earlier` is a part of the run.

Scores are on a grid, because the last bits of float64 noise may reveal the number. A tiny score of full precision can
only come from 0 right answers.

Two scores of one step would be two releases. So a score is drawn under a lock on the file, and only if the file does
not hold it. Ranks need not share a disk, so only rank 0 draws.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from dpshard.accounting import calibrate_release, compute_epsilon, rounded_up
from dpshard.accounting.releases import Counts, in_figures
from dpshard.checkpoint.disk import why, write_all
from dpshard.config import is_count, require_delta, require_positive
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError
from dpshard.randomness import RandomSource, new_run_secret

GRID = 2.0**-10
"""Of noisy numbers of right answers."""


class PrivateScores:
    """Noisy shares of right answers on private validation samples, within a budget of their own.

    The validation samples are in no training batch. If persons have samples in both,
    `PrivacyEngine(earlier=scores.earlier(N))` covers both.

    Args:
        path: File of the scores, where a resumed run finds them: drawing again would cost again.
        samples: Public number M of validation samples.
        count: Largest number of scores.
        target_epsilon: Budget of all scores together.
        target_delta: Delta of that budget.

    Raises:
        ConfigurationError: for numbers out of range.
        CheckpointError: for a damaged file, or one of other settings.
    """

    def __init__(
        self, path: str | Path, *, samples: int, count: int, target_epsilon: float, target_delta: float
    ) -> None:
        for name, value in {"samples": samples, "count": count}.items():
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: it must be a positive int.")
        require_positive("target_epsilon", target_epsilon)
        require_delta(target_delta, samples)
        self._release = calibrate_release(samples, target_epsilon=target_epsilon, target_delta=target_delta)
        self._path, self._samples, self._count, self._delta = Path(path), samples, count, target_delta
        self._settings = {"samples": samples, "count": count, "noise": self.noise}
        self._scores: dict[int, float] = {}
        with self._locked() as file:
            self._scores = self._recorded(file)

    @property
    def noise(self) -> float:
        """Standard deviation of a score's noise, in right answers."""
        return math.sqrt(self._count) * self._release.noise_multiplier

    @property
    def best(self) -> int | None:
        """Step of the best score; None without scores."""
        return max(self._scores, key=self._scores.__getitem__, default=None)

    def earlier(self, sample_size: int) -> Counts:
        """Return what all scores cost a person with one of `sample_size` training samples."""
        return ((replace(self._release, sample_size=sample_size), 1),)

    def score(self, step: int, right: int) -> float:
        """Return the noisy share of right answers at `step`, `right` of M; the same at every call for one step.

        Raises BudgetExceededError for more steps than `count`, ConfigurationError on other ranks than rank 0.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            raise ConfigurationError(
                f"Rank {dist.get_rank()} asks for a score of step {step}, which would be one more release. Call score "
                f"only on rank 0, with the right answers of all ranks, and broadcast the result."
            )
        if not (type(step) is int and step >= 0):
            raise ConfigurationError(f"step={step!r}: give the step of the run, an int of at least 0.")
        if not (type(right) is int and 0 <= right <= self._samples):
            raise ConfigurationError(f"right: give the number of right answers, an int from 0 to {self._samples}.")
        with self._locked() as file:
            self._scores = self._recorded(file)
            if step not in self._scores:
                self._scores[step] = self._draw(file, step, right)
        return self._scores[step]

    def _draw(self, file: int, step: int, right: int) -> float:
        if len(self._scores) == self._count:
            raise BudgetExceededError(
                f"All {self._count} scores are spent: stop here, or choose by these scores. A new run may take a "
                f"larger count=."
            )
        [normal] = next(RandomSource(new_run_secret()).normals(1, np.float64))
        score = round((right + self.noise * float(normal)) / GRID) * GRID / self._samples
        self._append(file, {"step": step, "score": score})
        return score

    def epsilon(self) -> float:
        """Return epsilon of all scores, for one validation sample."""
        return compute_epsilon(self.earlier(self._samples), self._delta)

    def statement(self) -> str:
        """Return the guarantee of validation samples in one sentence."""
        return (
            f"epsilon = {rounded_up(self.epsilon())} at delta = {in_figures(self._delta)} for one validation sample of "
            f"M = {self._samples}, add-or-remove-one neighbours (zero-out at fixed M), {self._count} noisy counts of "
            f"right answers (accountant: pld; noise: Gaussian from AES-256); training samples have the guarantee of "
            f"the run"
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {why(error, self._path)}.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _recorded(self, file: int) -> dict[int, float]:
        try:
            content = os.pread(file, os.fstat(file).st_size, 0)
            whole = content[: content.rfind(b"\n") + 1]  # a truncated score was not handed out
            if whole != content:
                os.ftruncate(file, len(whole))
            first, *scores = [json.loads(line) for line in whole.splitlines()] or [self._settings]
            found = {int(row["step"]): float(row["score"]) for row in scores}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._path} does not hold scores: restore it from a copy.") from error
        if first != self._settings:
            raise CheckpointError(
                f"{self._path} holds scores of a run with other settings: restore these, or choose another path."
            )
        if not self._scores.items() <= found.items():
            raise CheckpointError(f"{self._path} has lost scores of this run: restore it from a copy.")
        if not whole:
            self._append(file, self._settings)
        return found

    def _append(self, file: int, row: dict[str, Any]) -> None:
        """Append a row, and flush it to the disk before the score is used."""
        try:
            write_all(file, json.dumps(row).encode() + b"\n")
            os.fsync(file)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {why(error, self._path)}.") from error
