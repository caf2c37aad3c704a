"""The two-distribution audit of runs that are one release: samples in a fixed order, with correlated noise or without.

[Note: The game of a whole run]
A trial is a run of its own, under a secret of its own, at a learning rate of 0. Half of the trials include the canary;
all other samples are blanks. The adversary knows in which steps the canary is (the order is no secret), and the weights
of the noise. It multiplies the releases Y = S + W Z, in the canary's direction, by C = W^-1, and gets C S + Z:
independent noise, and the canary's contributions along its columns of C. In units of the sensitivity, a sound engine
gives noise of standard deviation sigma, and a shift of norm at most 1. So the statistics of [Note: The game] in
steps.py apply, with a sampling probability of 1.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient, weighted_loss
from dpshard.applications.audit.steps import StepsAudit, judge, order_of, stepping
from dpshard.clipping.functions import parse_clipping_fn
from dpshard.config import check_positive, is_count, refuse_units
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError


def audit_runs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: SampleLoss,
    *,
    steps: int,
    batch_size: int,
    trials: int = 500,
    noise_multiplier: float = 0.5,
    clipping_fn: str = "automatic",
    **options: Any,
) -> StepsAudit:
    """Play `trials` runs of `steps` steps in a fixed order with the last of the N samples, and as many without it.

    `model`, `x`, `y`, `loss`, `trials`: as in `audit_steps`; `options`: arguments of PrivacyEngine, such as
    `noise_correlation`. Raises ConfigurationError for too few trials, no noise, or a canary without a gradient.
    """
    if not (is_count(trials) and trials >= 20):
        raise ConfigurationError(f"trials={trials!r}: give at least 20, because a fifth of them selects the test.")
    check_positive("noise_multiplier", noise_multiplier)
    refuse_units(options, "audit_runs")
    gradient = sample_gradient(copy.deepcopy(model).train(), x[-1:], y[-1:], loss)
    facts = {"batch_size": batch_size, "sample_size": len(x), "steps": steps, "noise_multiplier": noise_multiplier}
    facts |= {"clipping_fn": clipping_fn, "sampling": "fixed-order", "verify": False} | options
    played: dict[float, Any] = {1.0: [], 0.0: []}
    mechanism = None
    for weight in order_of(trials):
        engine = PrivacyEngine(model, **facts)
        try:
            mechanism = engine.mechanism
            canary = CanaryGradient(gradient, mechanism.clipping_groups, parse_clipping_fn(clipping_fn))
            played[weight].append(_trial(engine, canary, x, y, loss, weight))
        finally:
            engine.detach()
    assert mechanism is not None  # there are trials
    return StepsAudit(trials=judge(played, mechanism, q=1.0), steps=steps, mechanism=mechanism)


def _trial(
    engine: PrivacyEngine, canary: CanaryGradient, x: Tensor, y: Tensor, loss: SampleLoss, weight: float
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return rows of C S + Z in the canary's direction [P], and its part in them [P], in units of the sensitivity."""
    mechanism, step, n = engine.mechanism, stepping(engine.model), len(x)
    is_canary = torch.arange(n) == n - 1
    data = TensorDataset(x, y, weight * is_canary, is_canary)
    released, added = [], []
    for logical_batch in engine.batches(data, 2):
        aim, drawn = canary.aim(tuple(engine.thresholds.values())), 0.0
        for x_B, y_B, weight_B, is_canary_B in logical_batch:
            scale_B = weight_B * torch.where(is_canary_B, aim.pull, 1.0)
            weighted_loss(loss(engine.model(x_B), y_B), scale_B, mechanism.loss_reduction).backward()
            drawn += float((is_canary_B & ~logical_batch.is_padding).any())
        engine.privatize()
        released.append(canary.along(engine.internals.full_gradient))
        added.append(min(drawn, 1.0) * np.array(canary.lengths(aim)))
        step()
    C = np.tril(toeplitz(mechanism.correlation.strategy(mechanism.schedule.steps)))
    unit = mechanism.max_grad_norm * mechanism.sensitivity
    z_TP, shift_TP = C @ np.array(released) * mechanism.schedule[0] / unit, C @ np.array(added) / unit
    return list(zip(z_TP, shift_TP, strict=True))
