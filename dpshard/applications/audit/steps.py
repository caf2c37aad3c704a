"""The two-distribution audit: the same steps many times over, with and without one sample, and who tells them apart.

[Note: The game]
The engine under audit, with its real model, loss, sampling, backward, clipping, noise and sharding, takes the same
steps again and again, at a learning rate of 0. In half of the trials one sample, the canary, is among the data. An
adversary who knows everything else looks at the gradients that are released to the optimizer, in the direction of what
clipping leaves of the canary (whose gradient plain autograd computes beforehand), parameter by parameter, in units of
the noise that a noise multiplier of 1 would have: z_p ~ N(0 or r_p, sigma^2) where all is well, for r of norm nearly 1.
It has three ways to tell "in" from "out" by the z of the steps of a trial:
- the likelihood ratio of a Poisson-sampled Gaussian, the best there is against a sound engine;
- the same with the deviation of every z_p as the first fifth of the trials shows it, rather than as accounted: weights
  r_p / var_p find a parameter with too little noise, however small its part;
- the spread of sum r_p z_p, max - min, which noise that is re-used across steps gives away.
The first fifth of each kind chooses the way and the threshold, the others are counted (bounds.py).

The canary's loss is multiplied by what makes most of it pass the clipping of the step (canary.py): a
guarantee holds for every loss, and clipping may drop what is long, or follow the gradients.

With a sampling probability of 1 the other samples are live, so that a canary that changes *their* gradients is noticed;
below, they are blanks, which contribute nothing, so that the other samples' own draws do not drown the canary's. They
are blanks under adaptive thresholds, too: these move from trial to trial, and with them what they leave of the other
samples, which would drown it as well. Trials with and without the canary come in random order: the first half of a run
differs from the second in its thresholds, which is nothing that the canary did.
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
from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient
from dpshard.backends.deepspeed.config import is_model_engine
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.config import check_positive, is_count, refuse_units
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError

DELTAS = (1e-5, 1e-2, *(tenths / 10 for tenths in range(1, 10)))
"""Where on the curve of epsilon over delta a guarantee is held against the trials."""

PREFERRED = 1.15
"""What another way to tell has to promise, over what the one before promises."""


@dataclass(frozen=True, kw_only=True)
class StepsAudit:
    """What the trials proved, beside what was accounted for the same steps."""

    trials: Trials
    steps: int
    """Steps of a trial."""
    mechanism: Mechanism
    """Of the engine under audit."""

    @property
    def accounted_mu(self) -> float | None:
        """Mu of the guarantee, if it is Gaussian: every sample in every step, and Gaussian noise."""
        mechanism = self.mechanism
        sure = mechanism.schedule[0] == mechanism.sample_size and mechanism.max_batch_size is None
        gaussian = sure and mechanism.noise == "gaussian"
        return math.sqrt(self.steps) / mechanism.noise_multiplier if gaussian else None

    def accounted(self, delta: float) -> float:
        """Epsilon of the steps of one trial by the engine's accountant."""
        releases = ((self.mechanism.release(0), self.steps),)
        return epsilon_of(releases, delta, self.mechanism.accountant)

    def lower_bound(self, delta: float, confidence: float) -> float:
        """Epsilon at `delta` is at least this, with probability `confidence`; of Gaussian noise, by its mu."""
        if self.accounted_mu is not None:
            return gdp_epsilon(self.trials.mu(confidence), delta)
        return self.trials.epsilon(delta, confidence)

    def refuted_at(self) -> float | None:
        """Return a delta at which the trials refute the accounted epsilon, or None.

        A sound engine is refuted with probability 1 - REFUTED_BEYOND at most, over all deltas together.
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
        model: The model; it is trained at a learning rate of 0, and given back as an ordinary one.
        x, y: Inputs and targets of the N samples, rows of tensors; the last one is the canary.
        loss: The loss of every sample, [B].
        trials, steps: Trials with the canary, and as many without, of `steps` steps; a fifth chooses the test.
        batch_size: Expected batch size; by default N, so that every sample is in every batch.
        micro_batch_size: Rows that are computed at once; one that does not divide N has padding in every batch.
        prepare: Wraps the model for sharded training (for DeepSpeed, what deepspeed.initialize() returns).
        on_step: Called after each of the 2 * trials * steps steps.
        noise_multiplier, clipping_fn, options: Of PrivacyEngine; neither tiny nor huge epsilons prove most.

    On several ranks, all of them call it with the same arguments, and get the same result.
    Raises ConfigurationError for too few trials, no noise, no loss of every sample, or a canary without a gradient.
    """
    if not (is_count(trials) and trials >= 20):
        raise ConfigurationError(f"trials={trials!r}: at least 20; a fifth of them chooses the test.")
    check_positive("noise_multiplier", noise_multiplier)
    refuse_units(options, "audit_steps")
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
        odd = CanaryGradient(gradient, engine.mechanism.clipping_groups, parse_clipping_fn(clipping_fn))
        step, datasets = stepping(prepared), {canary: _data(engine, x, y, canary) for canary in (1.0, 0.0)}
        played: dict[float, list[list[tuple[list[float], list[float]]]]] = {1.0: [], 0.0: []}
        for canary in _order(trials):
            found = []
            for release in _releases(prepared, engine, step, datasets[canary], loss, odd, steps, micro_batch_size):
                found.append(release)
                on_step()
            played[canary].append(found)
    finally:
        engine.detach()
    return StepsAudit(trials=_play(played, engine.mechanism), steps=steps, mechanism=engine.mechanism)


def _data(engine: PrivacyEngine, x: Tensor, y: Tensor, canary: float) -> TensorDataset:
    """Return (x, y, weight, is canary) of a trial; the weight of the canary is `canary`."""
    n, mechanism = len(x), engine.mechanism
    live = float(mechanism.schedule[0] == n and mechanism.adaptive_clipping is None)
    weights = torch.full((n,), live)
    weights[-1] = canary
    # Nothing of an absent canary is left: its row is a blank, with the values of another sample.
    rows = torch.arange(n) if canary else torch.tensor([*range(n - 1), 0])
    return TensorDataset(x[rows], y[rows], weights, torch.arange(n) == n - 1)


def _order(trials: int) -> list[float]:
    """1.0 for each trial with the canary, 0.0 for each without it, mixed; the same on all ranks."""
    # What the steps before have left behind must tell nothing: adaptive thresholds, say.
    return np.random.default_rng(0).permutation(np.repeat([1.0, 0.0], trials)).tolist()


class _Scores(NamedTuple):
    """Of N trials of T steps, for P parameters."""

    z_NTP: NDArray[np.float64]
    """What was released in the canary's direction."""
    shift_NTP: NDArray[np.float64]
    """What the canary contributes to it if it is drawn."""

    def likelihood(self, var_P: NDArray[np.float64], q: float) -> NDArray[np.float64]:
        """Of each trial, [N]: the log likelihood ratio for these variances of the noise."""
        weights_NTP = self.shift_NTP / var_P
        var_NT = (weights_NTP * self.shift_NTP).sum(2)  # of the weighted sum, and what the canary adds to it
        ratio_NT = log_likelihood_ratio((weights_NTP * self.z_NTP).sum(2), var_NT, q, np.sqrt(var_NT))
        return ratio_NT.sum(1)

    def spread(self) -> NDArray[np.float64]:
        """Of each trial, [N]: how far the steps are apart."""
        return np.ptp((self.shift_NTP * self.z_NTP).sum(2), axis=1)


def _releases(
    model: nn.Module,
    engine: PrivacyEngine,
    step: Callable[[], None],
    data: TensorDataset,
    loss: SampleLoss,
    odd: CanaryGradient,
    steps: int,
    micro_batch_size: int,
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield each release in the canary's direction, and the contribution [P] of the canary if it is drawn."""
    mechanism, device = engine.mechanism, next(model.parameters()).device
    model.train()
    for logical_batch in engine.batches(data, micro_batch_size, steps=steps):
        aim = odd.aim(tuple(engine.thresholds.values()))
        for x, y, weight_B, is_canary_B in logical_batch:
            scale_B = weight_B * torch.where(is_canary_B, aim.pull, 1.0)
            losses_B = loss(model(x.to(device)), y.to(device))
            if losses_B.shape != scale_B.shape:
                raise ConfigurationError(
                    f"The loss of {len(scale_B)} samples has the shape {list(losses_B.shape)}: return one of each "
                    f"sample, [B], as cross_entropy(..., reduction='none') does."
                )
            losses_B = losses_B * scale_B.to(device)
            (losses_B.mean() if mechanism.loss_reduction == "mean" else losses_B.sum()).backward()
        engine.privatize()
        unit = noise_unit(engine, logical_batch.step)
        scale = mechanism.schedule[logical_batch.step] / unit
        z = [reached * scale for reached in odd.along(engine.internals.full_gradient)]
        step()
        yield z, [length / unit for length in odd.lengths(aim)]


def stepping(prepared: nn.Module) -> Callable[[], None]:
    """Return a function that takes a step at a learning rate of 0, and drops the gradients."""
    if is_model_engine(prepared):  # DeepSpeed has the optimizer, and a step of its own
        for group in prepared.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.0
        return prepared.step  # type: ignore[return-value]
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def noise_unit(engine: PrivacyEngine, step: int) -> float:
    """Return the L2 sensitivity in force at `step`, the last one released: std of the noise on the sum / sigma.

    With fixed thresholds it is max_grad_norm.
    """
    mechanism = engine.mechanism
    if mechanism.noise_multiplier == 0:
        return mechanism.max_grad_norm
    return engine.gradient_noise_std * mechanism.schedule[step] / mechanism.noise_multiplier


def _play(played: dict[float, Any], mechanism: Mechanism) -> Trials:
    """Choose a test on the first fifth of the trials, and count its errors on the others."""
    without, within = (_Scores(*np.moveaxis(np.array(played[canary]), 2, 0)) for canary in (0.0, 1.0))
    q, sigma = mechanism.schedule[0] / mechanism.sample_size, mechanism.noise_multiplier
    head = len(without.z_NTP) // 5
    accounted_P = np.full(without.z_NTP.shape[2], sigma**2)
    # Noise that is missing altogether has the rounding of the sums for a deviation; it must not be 0.
    found_P = without.z_NTP[:head].var((0, 1)) + 1e-12
    ways: list[Callable[[_Scores], NDArray[np.float64]]] = [
        lambda scores: scores.likelihood(accounted_P, q),
        lambda scores: scores.likelihood(found_P, q),
    ]
    if without.z_NTP.shape[1] > 1:
        ways.append(_Scores.spread)
    best: tuple[float, Trials] | None = None
    for way in ways:
        out, into = way(without), way(within)
        threshold, promise = _threshold(out[:head], into[:head])
        # The first is the best against a sound engine, so another one has to promise more than luck may.
        if best is None or promise > PREFERRED * best[0]:
            best = promise, _count(out[head:], into[head:], threshold)
    assert best is not None
    return best[1]


def log_likelihood_ratio(
    z: NDArray[np.float64],
    shift: NDArray[np.float64] | float,
    q: float,
    sigma: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Of releases z: log of the density with a sample that adds `shift` with probability `q`, over that without it."""
    drawn = (shift * z - np.square(shift) / 2) / sigma**2
    return drawn if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + drawn)


def _threshold(without: NDArray[np.float64], within: NDArray[np.float64]) -> tuple[float, float]:
    """Return the threshold for "in" that proves most on these trials, and the bound that it would prove."""
    values = np.unique(np.concatenate([without, within]))
    middles: Sequence[float] = [*((values[1:] + values[:-1]) / 2)] or [float(values[0])]
    thinned = middles[:: max(1, len(middles) // 100)]
    return max(((t, _count(without, within, t).mu(0.9)) for t in thinned), key=lambda found: found[1])


def _count(without: NDArray[np.float64], within: NDArray[np.float64], threshold: float) -> Trials:
    return Trials(int((without > threshold).sum()), len(without), int((within <= threshold).sum()), len(within))
