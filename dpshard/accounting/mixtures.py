"""Privacy losses of steps that draw samples one by one, where a unit of privacy has several samples.

[Note: Units of several samples]
A step draws every sample with probability q, independently; a unit has at most G samples. In units of R, Q = N(0,
sigma^2) and P = sum over k of Binomial(G, q)(k) N(k, sigma^2) dominate both directions. Mass may move to a larger k.
docs/accounting.md has the proof, and the bound `error` on what dp-accounting's delta lacks.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import stats

from dpshard.accounting.releases import Counts, Release

PRECISION = 1e-6
RARE = 1e-30
"""Probability below which a number of drawn samples is treated as all G."""


def mixture(release: Release) -> tuple[list[float], list[float]]:
    """Return the possible numbers of drawn samples of a unit, and their probabilities."""
    G, q = release.max_rows_per_unit, release.sampling_probability
    most = min(G, int(stats.binom.isf(RARE, G, q)))
    drawn = list(range(most + 1))
    probabilities = stats.binom.pmf(drawn, G, q).tolist()
    if most < G:
        drawn.append(G)
        probabilities.append(float(stats.binom.sf(most, G, q)))
    return [float(k) for k in drawn], probabilities


def losses(release: Release, interval: float) -> PrivacyLossDistribution:
    """Return the privacy losses of a step, rounded up to a grid."""
    drawn, probabilities = mixture(release)
    return privacy_loss_distribution.from_mixture_gaussian_mechanism(
        release.noise_multiplier, drawn, probabilities, value_discretization_interval=interval
    )


def error(release: Release, interval: float) -> float:
    """Return a bound on what a step's delta lacks, relative to the mass of losses above."""
    G, q, sigma = release.max_rows_per_unit, release.sampling_probability, release.noise_multiplier
    edge = PRECISION**2 / 2 * (G / sigma**2) * (G + 12 * sigma) / sigma**2
    if q == 1:
        return edge
    undrawn = -G * math.log1p(-q)
    near = 1.01 * (1e-8 + 1e-5 * undrawn)  # tolerances of np.isclose
    return edge + (near if abs(undrawn - interval * round(undrawn / interval)) <= near else 0.0)


def interval(counts: Counts, delta: float) -> float:
    """Return the grid interval: a fifth of the standard deviation of a step's loss, within limits.

    Any grid gives an upper bound.
    """
    steps = sum(count for _, count in counts)
    deviation = min(_deviation(release, delta / steps) for release, _ in counts)
    return min(max(1e-5, deviation / 5), 0.1)


def _deviation(release: Release, rare: float) -> float:
    """Return the standard deviation of the loss, in leading order: sqrt(E[exp(k k' / sigma^2)] - 1) of two draws."""
    G, q = release.max_rows_per_unit, release.sampling_probability
    drawn = np.arange(1 + int(stats.binom.isf(rare, G, q)))
    probabilities = stats.binom.pmf(drawn, G, q)
    products = np.minimum(np.outer(drawn, drawn) / release.noise_multiplier**2, 600.0)
    return math.sqrt(float(probabilities @ np.expm1(products) @ probabilities))
