"""Lower bounds on epsilon from the success of an attack.

a is its false positive rate, b its false negative rate. (epsilon, delta)-DP implies a e^epsilon + b >= 1 - delta, and
the same with a and b swapped. Upper bounds on both refute it, for all deltas together. A mu-GDP mechanism obeys the
sharper mu >= Phi^-1(1 - a) - Phi^-1(b); Dong, Roth and Su 2022, arXiv:1905.02383.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpshard.config import is_count
from dpshard.errors import ConfigurationError

ATTACKS = 4
FALSE_ALARM = 1e-6 / ATTACKS
"""Probability that one attack refutes a sound engine."""
REFUTED_BEYOND = 1 - FALSE_ALARM
MAX_EPSILON = 64.0
GUESSED_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True, slots=True)
class Trials:
    """Errors of a test, fixed beforehand, in independent trials."""

    false_positives: int
    """Trials without the sample that the test judges "in"."""
    without: int
    false_negatives: int
    """Trials with the sample that the test judges "out"."""
    within: int

    def __post_init__(self) -> None:
        for errors, trials in ((self.false_positives, self.without), (self.false_negatives, self.within)):
            if not (is_count(trials) and 0 <= errors <= trials):
                raise ConfigurationError(f"{errors} errors in {trials} trials: an attack needs trials of both kinds.")

    def rates(self, confidence: float) -> tuple[float, float]:
        """Return upper bounds of both error rates (Clopper and Pearson 1934)."""
        error = (1 - require_confidence(confidence)) / 2
        return (
            _clopper_pearson(self.false_positives, self.without, error),
            _clopper_pearson(self.false_negatives, self.within, error),
        )

    def epsilon(self, delta: float, confidence: float) -> float:
        """Return a lower bound on epsilon."""
        a, b = self.rates(confidence)
        found = [math.log((1 - delta - one) / other) for one, other in ((a, b), (b, a)) if one < 1 - delta]
        return max(0.0, *found) if found else 0.0

    def mu(self, confidence: float) -> float:
        """Return a lower bound on mu (GDP)."""
        a, b = self.rates(confidence)
        return max(0.0, float(stats.norm.isf(a) - stats.norm.ppf(b)))


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of at least `right` right `guesses` under (epsilon, delta)-DP.

    Each of the m `canaries` is in by a fair coin. The bound is beta + alpha m delta, with beta = P[X >= v] and alpha =
    max_i (2 / i) P[v > X >= v - i]. X is Binomial(r, e^eps / (1 + e^eps)). Steinke et al. 2023, arXiv:2305.08846,
    Theorem 5.2.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ConfigurationError(
            f"right={right}, guesses={guesses}, canaries={canaries}: each must be at most the next."
        )
    chance = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(right - 1, guesses, chance))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))  # i = 1, 2, ...
    alpha = float((2 * below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, beta + alpha * canaries * delta)


def one_run_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return a lower bound: smaller epsilons have p-values below 1 - confidence."""
    error = 1 - require_confidence(confidence)

    def rejected(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) < error

    stride, lo = 0.125, 0.0
    if not rejected(lo):
        return 0.0
    # The p-value may not be monotone, so no epsilon may be skipped.
    while lo < MAX_EPSILON and rejected(lo + stride):
        lo += stride
    hi = lo + stride
    for _ in range(30):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if rejected(middle) else (lo, middle)
    return lo


@dataclass(frozen=True, slots=True)
class Guesses:
    """Results of a one-run attack."""

    canaries: int
    tried: tuple[tuple[int, int], ...]
    """(guesses, right ones), for numbers of guesses that were fixed beforehand."""

    def epsilon(self, delta: float, confidence: float) -> float:
        """Return the best lower bound."""
        each = 1 - (1 - require_confidence(confidence)) / len(self.tried)
        return max(one_run_epsilon(self.canaries, n, right, delta, each) for n, right in self.tried)


def guess(scores_m: Sequence[float] | NDArray[np.float64], included_m: Sequence[bool] | NDArray[np.bool_]) -> Guesses:
    """Guess "in" for the highest scores, "out" for as many of the lowest."""
    scores, included = np.asarray(scores_m, np.float64), np.asarray(included_m, np.bool_)
    m = len(scores)
    if m < 2 or len(included) != m:
        raise ConfigurationError(
            f"{m} scores for {len(included)} canaries: give at least two canaries, and one score for each."
        )
    order = np.argsort(np.where(np.isnan(scores), -np.inf, scores), kind="stable")
    halves = sorted({max(1, int(m * share / 2)) for share in GUESSED_SHARES})
    tried = ((2 * k, int(included[order[-k:]].sum() + (~included[order[:k]]).sum())) for k in halves)
    return Guesses(m, tuple(tried))


def require_confidence(confidence: float) -> float:
    """Return `confidence`; raise ConfigurationError unless 0 < confidence < 1."""
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence={confidence!r}: it is a probability, strictly between 0 and 1.")
    return confidence


def _clopper_pearson(errors: int, trials: int, error: float) -> float:
    return 1.0 if errors == trials else float(stats.beta.isf(error, errors + 1, trials - errors))
