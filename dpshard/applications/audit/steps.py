"""The two-distribution audit: tell trials with one sample from trials without it (docs/audit.md).

The adversary projects each release on the canary's clipped gradient, by parameter, in units of the noise at sigma = 1.
A sound engine gives z_p ~ N(0 or r_p, sigma^2), with r of norm nearly 1. Statistics of a trial:
- the likelihood ratio of a Poisson-sampled Gaussian, optimal against a sound engine;
- the same with the found deviation of z_p, for a parameter with too little noise;
- the spread, max - min, of sum r_p z_p, for re-used noise.
The canary's loss is scaled so that clipping keeps most of it: a guarantee holds for every loss. At sampling probability
1 the other samples are live, to notice a canary that changes *their* gradients. Else their draws, or adaptive
thresholds, would drown it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.accounting import Mechanism, epsilon_of
from dpshard.accounting.composition import gdp_epsilon
from dpshard.applications.audit.bounds import REFUTED_BEYOND, Trials
from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient, weighted_loss
from dpshard.backends.deepspeed.config import is_model_engine
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.config import is_count, refuse_units, require_positive
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError

DELTAS = (1e-5, 1e-2, *(tenths / 10 for tenths in range(1, 10)))

PREFERRED = 1.15
"""Factor by which another statistic must be better than the first, which is optimal against a sound engine."""


@dataclass(frozen=True, kw_only=True)
class StepsAudit:
    """The errors of the trials, and the bounds that they prove."""

    trials: Trials
    steps: int
    mechanism: Mechanism

    @property
    def accounted_mu(self) -> float | None:
        """Mu of a Gaussian guarantee, or None."""
        mechanism = self.mechanism
        if mechanism.sampling == "fixed-order":
            return 1 / mechanism.noise_multiplier
        sure = mechanism.schedule[0] == mechanism.sample_size and mechanism.max_batch_size is None
        gaussian = sure and mechanism.noise == "gaussian"
        return math.sqrt(self.steps) / mechanism.noise_multiplier if gaussian else None

    def accounted(self, delta: float) -> float:
        """Return the accounted epsilon of a trial."""
        return epsilon_of(self.mechanism.releases(self.steps), delta, self.mechanism.accountant)

    def lower_bound(self, delta: float, confidence: float) -> float:
        """Return a lower bound on epsilon."""
        if self.accounted_mu is not None:
            return gdp_epsilon(self.trials.mu(confidence), delta)
        return self.trials.epsilon(delta, confidence)

    def refuted_at(self) -> float | None:
        """Return a delta at which the trials refute the accounted epsilon, or None.

        P <= 1 - REFUTED_BEYOND for a sound engine.
        """
        mu = self.accounted_mu
        if mu is not None and self.trials.mu(REFUTED_BEYOND) > mu:
            return self.mechanism.target_delta
        bounds = ((delta, self.trials.epsilon(delta, REFUTED_BEYOND)) for delta in DELTAS)
        return next((delta for delta, bound in bounds if bound > 0 and bound > self.accounted(delta)), None)


def audit_steps(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: SampleLoss,
    *,
    trials: int = 1000,
    steps: int = 1,
    batch_size: int | None = None,
    micro_batch_size: int = 3,
    noise_multiplier: float = 0.5,
    clipping_fn: str | ClippingFunction = "automatic",
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    on_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> StepsAudit:
    """Play `trials` trials of `steps` steps with the last of the N samples, and as many without it.

    Args:
        model: Trained at a learning rate of 0, and an ordinary one afterwards.
        x, y: Inputs and targets, N rows each; the last row is the canary.
        loss: Returns losses [B].
        trials, steps: Trials of either kind, and steps of each.
        batch_size: Expected batch size; default N, every sample in every batch.
        micro_batch_size: Rows per forward; one that does not divide N causes padding.
        prepare: Wraps the model for sharded training; for DeepSpeed, by deepspeed.initialize().
        on_step: Called after each step.
        noise_multiplier, clipping_fn, options: Arguments of PrivacyEngine.

    All ranks must pass equal arguments. Raises ConfigurationError for too few trials, no noise, a loss that is not [B],
    or a canary without a gradient.
    """
    require_game(trials, noise_multiplier, options, "audit_steps")
    if options.get("sampling", "poisson") != "poisson":
        raise ConfigurationError(
            f"audit_steps plays single steps of Poisson samples, so it says nothing about sampling="
            f"{options['sampling']!r}. Audit whole runs by audit_runs."
        )
    n = len(x)
    gradient = sample_gradient(copy.deepcopy(model).train(), x[-1:], y[-1:], loss)
    prepared = prepare(model)
    engine = PrivacyEngine(
        prepared,
        batch_size=n if batch_size is None else batch_size,
        sample_size=n,
        steps=2 * trials * steps,
        noise_multiplier=noise_multiplier,
        clipping_fn=clipping_fn,
        **options,
    )
    try:
        canary = CanaryGradient(gradient, engine.mechanism.clipping_groups, parse_clipping_fn(clipping_fn))
        played = _played(Game(prepared, engine, canary, loss, micro_batch_size), x, y, trials, steps, on_step)
    finally:
        engine.detach()
    mechanism = engine.mechanism
    chances = by_coins(mechanism.schedule[0] / mechanism.sample_size)
    return StepsAudit(trials=judge(played, mechanism, chances), steps=steps, mechanism=mechanism)


def require_game(trials: int, noise_multiplier: float, options: dict[str, Any], audit: str) -> None:
    """Raise ConfigurationError unless the game can be played."""
    if not (is_count(trials) and trials >= 20):
        raise ConfigurationError(f"trials={trials!r}: give at least 20, because a fifth of them selects the test.")
    require_positive("noise_multiplier", noise_multiplier)
    refuse_units(options, audit)


_Release = tuple[list[float], list[float]]
"""[P] in the canary's direction, and its part [P]."""


class Played(NamedTuple):
    """A step of a game."""

    step: int
    drawn: bool
    along: list[float]
    lengths: list[float]
    """The canary's part [P] if it is drawn."""


@dataclass(frozen=True)
class Game:
    """An engine and a canary."""

    model: nn.Module
    engine: PrivacyEngine
    canary: CanaryGradient
    loss: SampleLoss
    micro_batch_size: int

    def play(self, data: TensorDataset, step: Callable[[], None], steps: int | None = None) -> Iterator[Played]:
        """Yield the steps on rows (x, y, weight, is canary)."""
        engine, mechanism, device = self.engine, self.engine.mechanism, next(self.model.parameters()).device
        self.model.train()
        for logical_batch in engine.batches(data, self.micro_batch_size, steps=steps):
            aim, drawn = self.canary.aim(tuple(engine.thresholds.values())), False
            for x, y, weight_B, is_canary_B in logical_batch:
                losses_B = self.loss(self.model(x.to(device)), y.to(device))
                scale_B = weight_B * torch.where(is_canary_B, aim.pull, 1.0)
                weighted_loss(losses_B, scale_B, mechanism.loss_reduction).backward()
                drawn |= bool((is_canary_B & ~logical_batch.is_padding).any())
            engine.privatize()
            along = self.canary.along(engine.internals.full_gradient)
            step()
            yield Played(logical_batch.step, drawn, along, self.canary.lengths(aim))


def _played(
    game: Game, x: Tensor, y: Tensor, trials: int, steps: int, on_step: Callable[[], object]
) -> dict[float, list[list[_Release]]]:
    engine, step = game.engine, stepping(game.model)
    datasets = {weight: _data(engine, x, y, weight) for weight in (1.0, 0.0)}
    found: dict[float, list[list[_Release]]] = {1.0: [], 0.0: []}
    for weight in order_of(trials):
        found[weight].append([])
        for played in game.play(datasets[weight], step, steps):
            unit = noise_unit(engine, played.step)
            scale = engine.mechanism.schedule[played.step] / unit
            found[weight][-1].append(([z * scale for z in played.along], [r / unit for r in played.lengths]))
            on_step()
    return found


def _data(engine: PrivacyEngine, x: Tensor, y: Tensor, canary: float) -> TensorDataset:
    n, mechanism = len(x), engine.mechanism
    live = float(mechanism.schedule[0] == n and mechanism.adaptive_clipping is None)
    weights = torch.full((n,), live)
    weights[-1] = canary
    # An absent canary's row is another sample.
    rows = torch.arange(n) if canary else torch.tensor([*range(n - 1), 0])
    return TensorDataset(x[rows], y[rows], weights, torch.arange(n) == n - 1)


def order_of(trials: int) -> list[float]:
    """Return the canary's weights in a random order, equal on all ranks."""
    return np.random.default_rng(0).permutation(np.repeat([1.0, 0.0], trials)).tolist()


Chances = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Ratios of trials [N] from those of steps [N, T]."""


def by_coin(q: float, ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log ratios of a sample that is drawn with probability `q`, from those of a drawn one."""
    return ratio if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio)


def by_coins(q: float) -> Chances:
    """Return ratios of a canary in each step with probability `q`."""
    return lambda ratio_NT: by_coin(q, ratio_NT).sum(1)


def by_allocation(epoch: int, *, one_draw: bool) -> Chances:
    """Return ratios of a canary in one random step of each epoch, or in the same one."""

    def of_trials(ratio_NT: NDArray[np.float64]) -> NDArray[np.float64]:
        missing = -ratio_NT.shape[1] % epoch
        draws = np.pad(ratio_NT, ((0, 0), (0, missing))).reshape(len(ratio_NT), -1, epoch)
        if one_draw:
            draws = draws.sum(1, keepdims=True)
        return (np.logaddexp.reduce(draws, axis=2) - math.log(epoch)).sum(1)

    return of_trials


class _Scores(NamedTuple):
    """Scores of N trials, T steps, P parameters."""

    z_NTP: NDArray[np.float64]
    shift_NTP: NDArray[np.float64]
    """The canary's part in z if it is drawn."""

    def likelihood(self, var_P: NDArray[np.float64], chances: Chances) -> NDArray[np.float64]:
        # Where the canary's part is 0, z does not depend on the canary.
        return chances(((self.z_NTP - self.shift_NTP / 2) * self.shift_NTP / var_P).sum(2))

    def spread(self) -> NDArray[np.float64]:
        return np.ptp((self.shift_NTP * self.z_NTP).sum(2), axis=1)


def stepping(prepared: nn.Module) -> Callable[[], None]:
    """Return a step at a learning rate of 0."""
    if is_model_engine(prepared):
        for group in prepared.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.0
        return prepared.step  # type: ignore[return-value]
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def noise_unit(engine: PrivacyEngine, step: int) -> float:
    """Return the L2 sensitivity at `step`."""
    mechanism = engine.mechanism
    if mechanism.noise_multiplier == 0:
        return mechanism.max_grad_norm
    return engine.gradient_noise_std * mechanism.schedule[step] / mechanism.noise_multiplier


def judge(played: dict[float, Any], mechanism: Mechanism, chances: Chances) -> Trials:
    """Select a test on the first fifth of the trials, and count its errors on the others."""
    without, within = (_Scores(*np.moveaxis(np.array(played[canary]), 2, 0)) for canary in (0.0, 1.0))
    sigma = mechanism.noise_multiplier
    head = len(without.z_NTP) // 5
    accounted_P = np.full(without.z_NTP.shape[2], sigma**2)
    # Without noise the variance may be 0.
    found_P = without.z_NTP[:head].var((0, 1)) + 1e-12
    ways: list[Callable[[_Scores], NDArray[np.float64]]] = [
        lambda scores: scores.likelihood(accounted_P, chances),
        lambda scores: scores.likelihood(found_P, chances),
    ]
    if without.z_NTP.shape[1] > 1:
        ways.append(_Scores.spread)
    best: tuple[float, Trials] | None = None
    for way in ways:
        out, into = way(without), way(within)
        threshold, promise = _threshold(out[:head], into[:head])
        if best is None or promise > PREFERRED * best[0]:
            best = promise, _count(out[head:], into[head:], threshold)
    assert best is not None
    return best[1]


def _threshold(without: NDArray[np.float64], within: NDArray[np.float64]) -> tuple[float, float]:
    values = np.unique(np.concatenate([without, within]))
    middles: Sequence[float] = [*((values[1:] + values[:-1]) / 2)] or [float(values[0])]
    thinned = middles[:: max(1, len(middles) // 100)]
    return max(((t, _count(without, within, t).mu(0.9)) for t in thinned), key=lambda found: found[1])


def _count(without: NDArray[np.float64], within: NDArray[np.float64], threshold: float) -> Trials:
    return Trials(int((without > threshold).sum()), len(without), int((within <= threshold).sum()), len(within))
