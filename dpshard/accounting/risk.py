"""A guarantee in terms of risk: bounds on an attacker who guesses whether one record was in the training data.

The attacker has all other records, and accuses if the outcome is in a set S. P is the outcome's distribution with the
record, Q without it: P(S) <= e^epsilon Q(S) + delta, and likewise for the complements. The least bound over all pairs
(epsilon, delta) of a mechanism holds, too (Dong, Roth and Su 2022, arXiv:1905.02383).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
    """One (epsilon, delta) that a mechanism satisfies."""

    epsilon: float
    delta: float


DELTAS = tuple(float(delta) for delta in np.geomspace(1e-4, 0.5, 10))
"""Deltas at which `profile` computes epsilon."""
HALVINGS = 9
"""Number of further deltas, by bisection towards the delta at which epsilon is 0."""


def profile(epsilon_at: Callable[[float], float]) -> list[Pair]:
    """Return pairs of a mechanism whose epsilon at delta is at most `epsilon_at(delta)`."""
    pairs = [Pair(epsilon_at(delta), delta) for delta in DELTAS]
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        pairs.append(Pair(epsilon_at((low + high) / 2), (low + high) / 2))
        low, high = (low, pairs[-1].delta) if pairs[-1].epsilon <= 1e-6 else (pairs[-1].delta, high)
    return pairs


RARELY = 10.0
"""Bound on the probability of a loss above `rarely_above`, as a multiple of delta."""


def rarely_above(epsilon: float) -> float:
    """Return a privacy loss that no result exceeds, except with probability 10 delta; see docs/accounting.md."""
    return epsilon - math.log1p(-1 / RARELY)


def mostly_below(pairs: Sequence[Pair], exception: float = 0.05) -> float:
    """Return a privacy loss that a result exceeds with a probability of at most `exception`.

    The least epsilon - ln(1 - delta / exception) of the pairs, or infinity.
    """
    return min((e - math.log1p(-delta / exception) for e, delta in pairs if delta < exception), default=math.inf)


def belief(loss: float, prior: float = 0.5) -> float:
    """Return the belief that a record is present after a result of privacy `loss`.

    Bayes' rule: prior e^loss / (prior e^loss + 1 - prior).
    """
    return prior / (prior + (1 - prior) * math.exp(-loss))


def right_guesses(pairs: Sequence[Pair]) -> float:
    """Return the largest probability to guess right whether a record is present, at even odds.

    The least (e^epsilon + delta) / (1 + e^epsilon) of the pairs; Kairouz et al. 2015, arXiv:1311.0776, Eq. 5.
    """
    return min(1.0, *(1 - (1 - delta) / (1 + _exp(epsilon)) for epsilon, delta in pairs))


def found_records(pairs: Sequence[Pair], wrongly_accused: float = 0.01) -> float:
    """Return the largest share of present records that a test finds if it accuses `wrongly_accused` of the absent ones.

    The least of e^epsilon a + delta and 1 - (1 - a - delta) / e^epsilon of the pairs, for a = `wrongly_accused`.
    """
    a = wrongly_accused
    bounds = [min(_exp(e) * a + delta, 1 - (1 - a - delta) / _exp(e)) for e, delta in pairs]
    return min(1.0, *bounds)


def _exp(epsilon: float) -> float:
    return math.exp(epsilon) if epsilon < 700 else math.inf
