"""The two-distribution audit of whole runs: for samplings and correlated noise that join steps.

[Note: The game of a whole run] A trial is a separate run, under its own secret, at a learning rate of 0. Half of the
trials include the canary; all other samples are blanks. The adversary knows the weights of the noise. It multiplies the
releases Y = S + W Z, in the canary's direction, by C = W^-1, and gets C S + Z. That is independent noise, and the
canary's contributions along its columns of C. A canary in step t shows along column t, so the adversary projects on
each column where it may be. In units of the sensitivity, a sound engine gives noise of standard deviation sigma. A
canary in step t gives a shift of norm |C_t|.

A fixed order is no secret, so the adversary knows the steps of the canary. Their sum is one shift of norm at most 1. In
groups of a BandMF it has the group's turns, each with a coin. In balls in bins it has only the epochs. Noise along two
columns of different turns or epochs is independent, so log likelihood ratios add. The statistics of [Note: The game] in
steps.py then apply. They are a choice of the adversary: the proof needs none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.accounting.mechanism import Mechanism
from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient, weighted_loss
from dpshard.applications.audit.steps import Chances, StepsAudit, by_allocation, by_coins, judge, order_of, stepping
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.config import is_count, refuse_units, require_positive, steps_of_epoch
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
    micro_batch_size: int = 2,
    noise_multiplier: float = 0.5,
    clipping_fn: str | ClippingFunction = "automatic",
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    on_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> StepsAudit:
    """Play `trials` runs of `steps` steps with the last of the N samples, and as many without it.

    By default the samples are in a fixed order. `options`: arguments of PrivacyEngine, such as `sampling` and
    `noise_correlation`; all others are those of `audit_steps`. Raises ConfigurationError for too few trials, no noise,
    or a canary without a gradient.
    """
    if not (is_count(trials) and trials >= 20):
        raise ConfigurationError(f"trials={trials!r}: give at least 20, because a fifth of them selects the test.")
    require_positive("noise_multiplier", noise_multiplier)
    refuse_units(options, "audit_runs")
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
            game = _Game(prepared, engine, canary, loss, micro_batch_size)
            played[weight].append(game.play(x, y, weight, step, on_step))
        finally:
            engine.detach()
    assert mechanism is not None  # there are trials
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


@dataclass(frozen=True)
class _Game:
    """An engine of one trial; see [Note: The game of a whole run]."""

    model: nn.Module
    engine: PrivacyEngine
    canary: CanaryGradient
    loss: SampleLoss
    micro_batch_size: int

    def play(
        self, x: Tensor, y: Tensor, weight: float, step: Callable[[], None], on_step: Callable[[], object]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Return for each step [P] of noise and canary along its column of C, and [P] of a present canary."""
        n, mechanism, device = len(x), self.engine.mechanism, next(self.model.parameters()).device
        is_canary = torch.arange(n) == n - 1
        data = TensorDataset(x, y, weight * is_canary, is_canary)
        released, there, lengths = [], [], []
        self.model.train()
        for logical_batch in self.engine.batches(data, self.micro_batch_size):
            aim, drawn = self.canary.aim(tuple(self.engine.thresholds.values())), False
            for x_B, y_B, weight_B, is_canary_B in logical_batch:
                scale_B = weight_B * torch.where(is_canary_B, aim.pull, 1.0)
                losses_B = self.loss(self.model(x_B.to(device)), y_B.to(device))
                weighted_loss(losses_B, scale_B, mechanism.loss_reduction).backward()
                drawn |= bool((is_canary_B & ~logical_batch.is_padding).any())
            self.engine.privatize()
            released.append(self.canary.along(self.engine.internals.full_gradient))
            there.append(self._may_have_it(logical_batch.step, n, drawn=drawn))
            lengths.append(self.canary.lengths(aim))
            step()
            on_step()
        return self._along_columns(np.array(released), np.array(there)[:, None] * np.array(lengths))

    def _may_have_it(self, step: int, samples: int, *, drawn: bool) -> bool:
        """Return True if the adversary must expect the canary in `step`; only a fixed order is known to it."""
        if self.engine.mechanism.sampling == "fixed-order":
            return drawn
        groups = _groups(self.engine.mechanism)
        return step % groups == (samples - 1) % groups

    def _along_columns(
        self, released_TP: NDArray[np.float64], canary_TP: NDArray[np.float64]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        mechanism = self.engine.mechanism
        C = np.tril(toeplitz(mechanism.correlation.strategy(mechanism.schedule.steps)))
        length_T1 = np.linalg.norm(C, axis=0)[:, None]
        unit = mechanism.max_grad_norm * mechanism.sensitivity
        independent_TP = C @ released_TP * mechanism.schedule[0] / unit
        return list(zip(C.T @ independent_TP / length_T1, length_T1 * canary_TP / unit, strict=True))
