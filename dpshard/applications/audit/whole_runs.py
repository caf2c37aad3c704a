"""The two-distribution audit of whole runs.

A trial is a run under its own secret. The adversary multiplies the releases Y = S + W Z, in the canary's direction, by
C = W^-1, and gets C S + Z. It projects on each column C_t where the canary may be. A sound engine gives noise of
deviation sigma, and a shift of norm |C_t|.

In a fixed order, which is no secret, shifts are one of norm at most 1. In groups of a BandMF the canary has coins in
the group's turns, in balls in bins the epochs. Noise of different turns or epochs is independent, so log likelihood
ratios add.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.accounting.mechanism import Mechanism
from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient
from dpshard.applications.audit.steps import (
    Chances,
    Game,
    StepsAudit,
    by_allocation,
    by_coins,
    judge,
    order_of,
    require_game,
    stepping,
)
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.config import steps_of_epoch
from dpshard.engine import PrivacyEngine


def audit_runs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: SampleLoss,
    *,
    steps: int,
    batch_size: int,
    trials: int = 500,
    micro_batch_size: int = 2,
    noise_multiplier: float = 0.5,
    clipping_fn: str | ClippingFunction = "automatic",
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    on_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> StepsAudit:
    """Play `trials` runs of `steps` steps with the last of the N samples, and as many without it.

    By default the samples are in a fixed order. `options` are arguments of PrivacyEngine, others those of
    `audit_steps`. Raises ConfigurationError for too few trials, no noise, or a canary without a gradient.
    """
    require_game(trials, noise_multiplier, options, "audit_runs")
    gradient = sample_gradient(copy.deepcopy(model).train(), x[-1:], y[-1:], loss)
    prepared, function = prepare(model), parse_clipping_fn(clipping_fn)
    facts = {"batch_size": batch_size, "sample_size": len(x), "steps": steps, "noise_multiplier": noise_multiplier}
    facts |= {"clipping_fn": clipping_fn, "sampling": "fixed-order", "verify": False} | options
    played: dict[float, Any] = {1.0: [], 0.0: []}
    step, mechanism = stepping(prepared), None
    for weight in order_of(trials):
        engine = PrivacyEngine(prepared, **facts)
        try:
            mechanism = engine.mechanism
            canary = CanaryGradient(gradient, mechanism.clipping_groups, function)
            game = Game(prepared, engine, canary, loss, micro_batch_size)
            played[weight].append(_played(game, x, y, weight, step, on_step))
        finally:
            engine.detach()
    assert mechanism is not None
    return StepsAudit(trials=judge(played, mechanism, _chances(mechanism)), steps=steps, mechanism=mechanism)


def _chances(mechanism: Mechanism) -> Chances:
    samples, size = mechanism.sample_size, mechanism.schedule[0]
    if mechanism.sampling == "fixed-order":
        return by_coins(1.0)
    if mechanism.sampling == "balls-in-bins":
        return by_allocation(steps_of_epoch(samples, size), one_draw=mechanism.noise_correlation is not None)
    return by_coins(min(1.0, size / samples * _groups(mechanism)))


def _groups(mechanism: Mechanism) -> int:
    cyclic, correlation = mechanism.sampling == "cyclic-poisson", mechanism.noise_correlation
    return correlation.bands if cyclic and correlation is not None else 1


def _played(
    game: Game, x: Tensor, y: Tensor, weight: float, step: Callable[[], None], on_step: Callable[[], object]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return for each step [P] along its column of C, and a present canary's part [P]."""
    n, mechanism, groups = len(x), game.engine.mechanism, _groups(game.engine.mechanism)
    is_canary = torch.arange(n) == n - 1
    released, canary = [], []
    for played in game.play(TensorDataset(x, y, weight * is_canary, is_canary), step):
        released.append(played.along)
        in_order, in_turn = mechanism.sampling == "fixed-order", played.step % groups == (n - 1) % groups
        # The adversary knows a fixed order.
        canary.append(np.array(played.lengths) * (played.drawn if in_order else in_turn))
        on_step()
    C = np.tril(toeplitz(mechanism.correlation.strategy(mechanism.schedule.steps)))
    length_T1 = np.linalg.norm(C, axis=0)[:, None]
    unit = mechanism.max_grad_norm * mechanism.sensitivity
    independent_TP = C @ np.array(released) * mechanism.schedule[0] / unit
    return list(zip(C.T @ independent_TP / length_T1, length_T1 * np.array(canary) / unit, strict=True))
