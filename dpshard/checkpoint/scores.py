"""Noisy scores on private validation samples: for early stopping, and to choose a checkpoint.

[Note: What private scores cost]
A score is the number of right answers on M validation samples plus Gaussian noise, over M. One sample moves the number
by at most 1, whatever weights answer. K scores, each with noise of standard deviation sqrt(K) sigma, compose exactly to
one Gaussian release of sigma, even if later weights depend on earlier scores: Dong et al. 2019, arXiv:1905.02383,
Cor. 3.3. A training sample is in no score, and a validation sample in no sum. So what is chosen by scores costs a
training sample what the run costs, and a validation sample what the scores cost. A person with samples in both pays
both: then `releases` are a part of the run.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from dpshard.accounting import Release, SampledMechanism, calibrate, compute_epsilon, rounded_up
from dpshard.accounting.releases import Counts
from dpshard.checkpoint.disk import why
from dpshard.config import BatchSchedule, check_delta, check_positive, is_count
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError
from dpshard.randomness import RandomSource, derive_key, new_run_secret


class PrivateScores:
    """Noisy shares of right answers on private validation samples, within a budget of their own.

    One validation sample is protected: it is one person's, and in no training batch. `statement()` says how. If persons
    have samples in both, give `PrivacyEngine(earlier=scores.releases)`, whose epsilon then covers both.

    Args:
        path: File of the scores; a resumed run finds them there, because to draw them again would cost again.
        samples: Number M of validation samples; public.
        count: Largest number of scores.
        target_epsilon: Budget of all scores together.
        target_delta: Delta of that budget.

    Raises:
        ConfigurationError: for numbers out of range.
        CheckpointError: for a file of other settings, or a damaged one.
    """

    def __init__(
        self, path: str | Path, *, samples: int, count: int, target_epsilon: float, target_delta: float
    ) -> None:
        for name, value in {"samples": samples, "count": count}.items():
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: it must be a positive int.")
        check_positive("target_epsilon", target_epsilon)
        check_delta(target_delta, samples)
        alone = SampledMechanism(schedule=BatchSchedule((samples,)), sample_size=samples)
        sigma = calibrate(alone, target_epsilon=target_epsilon, target_delta=target_delta).noise_multiplier
        self.releases: Counts = ((Release(sigma, 1.0, samples), 1),)
        """What all scores together cost, as one release about the validation samples."""
        self._path, self._samples, self._count, self._delta = Path(path), samples, count, target_delta
        self._secret = new_run_secret()
        self._scores = self._recorded()

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of one score, in right answers."""
        return math.sqrt(self._count) * self.releases[0][0].noise_multiplier

    @property
    def best(self) -> int | None:
        """The step of the best score; None without scores."""
        return max(self._scores, key=self._scores.__getitem__, default=None)

    def score(self, step: int, right: int) -> float:
        """Return the noisy share of right answers at `step`, `right` of M; the same at every call for one step.

        Raises BudgetExceededError for more steps than `count`.
        """
        if step in self._scores:
            return self._scores[step]
        if not (type(right) is int and 0 <= right <= self._samples):
            raise ConfigurationError(f"right: give the number of right answers, an int from 0 to {self._samples}.")
        if len(self._scores) == self._count:
            raise BudgetExceededError(
                f"All {self._count} scores are spent: stop here, or choose by those. Give a larger count= to a new run."
            )
        [normal] = next(RandomSource(derive_key(self._secret, "score", step)).normals(1, np.float64))
        score = (right + self.noise * float(normal)) / self._samples
        self._append([{"step": step, "score": score}])
        self._scores[step] = score
        return score

    def epsilon(self) -> float:
        """Return epsilon of all scores, for one validation sample."""
        return compute_epsilon(self.releases, self._delta)

    def statement(self) -> str:
        """Return the guarantee of validation samples in one sentence."""
        return (
            f"epsilon = {rounded_up(self.epsilon())} at delta = {self._delta:g} for one validation sample of M = "
            f"{self._samples}, add-or-remove-one neighbours (zero-out at fixed M), {self._count} noisy counts of right "
            f"answers (accountant: pld; noise: Gaussian from AES-256); training samples have the guarantee of the run"
        )

    def _recorded(self) -> dict[int, float]:
        """Return the scores in the file, by step; begin the file if there is none."""
        settings = {"samples": self._samples, "count": self._count, "noise": self.noise}
        if not self._path.exists():
            self._append([settings])
            return {}
        try:
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a truncated score was not handed out
            if whole != content:
                os.truncate(self._path, len(whole))
            first, *scores = [json.loads(line) for line in whole.splitlines()]
            found = {int(row["step"]): float(row["score"]) for row in scores}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._path} does not hold scores: restore it from a copy.") from error
        if first != settings:
            raise CheckpointError(f"{self._path} holds scores of other settings: give those, or another path.")
        return found

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; they are on the disk before a score is used."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {why(error, self._path)}.") from error
