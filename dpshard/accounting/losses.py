"""Privacy losses of a step that draws samples one by one and adds Gaussian noise.

They are those of dp-accounting's `from_gaussian_mechanism`, which inverts the loss by a call of Python at each point of
the grid. Here one call of numpy inverts all of them, five to eight times as quickly.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld.pld_pmf import PLDPmf, create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray


def sampled_gaussian(noise_multiplier: float, probability: float, interval: float) -> PrivacyLossDistribution:
    """Return the losses of both directions on a grid, at `probability` of a sample; rounded by "connect the dots"."""

    def rounded(adjacency: AdjacencyType) -> PLDPmf:
        loss = GaussianPrivacyLoss(noise_multiplier, sampling_prob=probability, adjacency_type=adjacency)
        ends = loss.connect_dots_bounds()
        assert ends.epsilon_lower is not None
        assert ends.epsilon_upper is not None
        first, last = math.floor(ends.epsilon_lower / interval), math.ceil(ends.epsilon_upper / interval)
        deltas = _deltas(loss, noise_multiplier, interval * np.arange(first, last + 1, dtype=np.float64))
        return create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)

    removed = rounded(AdjacencyType.REMOVE)
    return PrivacyLossDistribution(removed, rounded(AdjacencyType.ADD) if probability < 1 else None)


def _deltas(loss: GaussianPrivacyLoss, noise_multiplier: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the hockey-stick divergence at each epsilon: at the largest x of a loss of epsilon or more.

    A step with every sample has the loss log(1 + (e^epsilon - 1) / q) there; its negative, of -epsilon, where a sample
    is added. Losses beyond -log(1 - q) do not occur.
    """
    sign = -1.0 if loss.adjacency_type == AdjacencyType.ADD else 1.0
    deltas = -np.expm1(np.minimum(epsilons, 0.0)) if sign > 0 else np.zeros_like(epsilons)
    occurs = np.full(epsilons.shape, True)
    if loss.sampling_prob < 1:
        occurs = np.expm1(np.minimum(sign * epsilons, 1.0)) > -loss.sampling_prob
    whole = sign * _without_sampling(sign * epsilons[occurs], loss.sampling_prob)
    x = -sign / 2 - whole * noise_multiplier**2
    deltas[occurs] = loss.mu_upper_cdf(x) - np.exp(epsilons[occurs] + np.asarray(loss.mu_lower_log_cdf(x)))
    return np.clip(deltas, 0.0, 1.0)


def _without_sampling(losses: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """Return log(1 + (e^loss - 1) / q), without overflow."""
    if q == 1:
        return losses
    small = np.log1p(np.expm1(np.minimum(losses, 1.0)) / q)
    large = losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)
