"""The two-distribution audit: the same steps many times over, with and without one sample, and who tells them apart.

[Note: The game]
The engine under audit, with its real model, loss, sampling, backward, clipping, noise and optimizer, takes the same
steps again and again, at a learning rate of 0. In half of the trials one sample, the canary, is among the data. An
adversary who knows everything else looks at the gradients that the optimizer saw, in the direction of the canary's own
gradient (which plain autograd computes beforehand), and in units of max_grad_norm: z ~ N(0 or 1, sigma^2) where all is
well. It has two ways to tell "in" from "out" by the z of the steps of a trial:
- the likelihood ratio of a Poisson-sampled Gaussian, the best there is against a sound engine;
- the spread, max z - min z, which noise that is re-used across steps gives away.
The first fifth of the trials chooses the way and the threshold, the others are counted (dpshard/audit/bounds.py).

With a sampling probability of 1 the other samples are live, so that a canary that changes *their* gradients is noticed;
below, they are blanks, which contribute nothing, so that the other samples' own draws do not drown the canary's.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard.accounting import compute_epsilon
from dpshard.audit.bounds import REFUTED_BEYOND, Trials, gdp_epsilon, subsampled
from dpshard.config import Mechanism, is_count
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

DELTAS = (1e-5, 1e-2, *(tenths / 10 for tenths in range(1, 10)))
"""Where on the curve of epsilon over delta a guarantee is held against the trials."""

SampleLoss = Callable[[Any, Tensor], Tensor]
"""The loss of every sample, [B], of the model's output and the targets."""


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
        mechanism = self.mechanism
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "target_delta=")  # the whole curve counts here, large deltas too
            return compute_epsilon(
                [(mechanism.schedule[0], self.steps)],
                noise_multiplier=mechanism.noise_multiplier,
                sample_size=mechanism.sample_size,
                target_delta=delta,
                max_batch_size=mechanism.max_batch_size,
                grid_elements=mechanism.grid_elements,
                accountant=mechanism.accountant,
            )

    def lower_bound(self, delta: float, confidence: float) -> float:
        """Epsilon at `delta` is at least this, with probability `confidence`; of Gaussian noise, by its mu."""
        if self.accounted_mu is not None:
            return gdp_epsilon(self.trials.mu(confidence), delta)
        return self.trials.epsilon(delta, confidence)

    def refuted_at(self) -> float | None:
        """A delta at which the trials refute the accounted epsilon; None if there is none.

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
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: Any,
) -> StepsAudit:
    """Play `trials` trials of `steps` steps with the last of the N samples, and as many without it.

    Args:
        model: The model to train; it is trained at a learning rate of 0, and given back as an ordinary one.
        x: Inputs of the N samples, rows of a tensor; the last one is the canary, best one with a large gradient.
        y: Their targets.
        loss: The loss of every sample, [B].
        trials: Trials with, and trials without the canary; a fifth of them chooses the test.
        steps: Steps of a trial.
        batch_size: Expected batch size; by default N, so that every sample is in every batch.
        micro_batch_size: Rows that are computed at once; one that does not divide N has padding in every batch.
        noise_multiplier: Of the engine under audit. Bounds are tightest where epsilon is neither tiny nor huge.
        prepare: Wraps the model for sharded training; what it returns is given to the engine.
        options: Of PrivacyEngine.

    On several ranks, all of them call it with the same arguments, and get the same result.
    Raises ConfigurationError if there are too few trials, or if the canary has no gradient.
    """
    if not (is_count(trials) and trials >= 20):
        raise ConfigurationError(f"trials={trials!r}: at least 20, of which a fifth chooses the test.")
    n = len(x)
    gradient = _gradient(model, x[-1:], y[-1:], loss)
    prepared = prepare(model)
    engine = PrivacyEngine(
        prepared,
        batch_size=n if batch_size is None else batch_size,
        sample_size=n,
        steps=2 * trials * steps,
        noise_multiplier=noise_multiplier,
        **options,
    )
    try:
        direction = _direction(gradient, engine.mechanism)
        live = 1.0 if engine.mechanism.schedule[0] == n else 0.0
        scores = {}
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0)
        for canary in (1.0, 0.0):
            weights = torch.full((n,), live)
            weights[-1] = canary
            # Nothing of an absent canary is left: its row is a blank, with the values of another sample.
            rows = torch.arange(n) if canary else torch.tensor([*range(n - 1), 0])
            data = TensorDataset(x[rows], y[rows], weights)
            projections = _projections(engine, optimizer, data, loss, direction, trials * steps, micro_batch_size)
            scores[canary] = np.fromiter(projections, np.float64).reshape(trials, steps)
    finally:
        engine.detach()
    return StepsAudit(trials=_play(scores[0.0], scores[1.0], engine.mechanism), steps=steps, mechanism=engine.mechanism)


def _gradient(model: nn.Module, x: Tensor, y: Tensor, loss: SampleLoss) -> dict[str, Tensor]:
    """The gradient of one sample by plain autograd, by parameter name."""
    model = copy.deepcopy(model).train()
    device = next(model.parameters()).device
    parameters = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    total = loss(model(x.to(device)), y.to(device)).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    found = {name: g.double() for name, g in zip(parameters, gradients, strict=True) if g is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    if not (0 < norm < math.inf):
        raise ConfigurationError(
            f"The gradient of the canary has norm {norm}: choose a sample that the model can learn."
        )
    return found


def _direction(gradient: dict[str, Tensor], mechanism: Mechanism) -> dict[str, Tensor]:
    """Where clipping takes a long gradient: every group has one norm, all of them together 1."""
    direction: dict[str, Tensor] = {}
    for names in mechanism.clipping_groups:
        group = {name: gradient[name] for name in names if name in gradient}
        norm = math.sqrt(sum(float(g.square().sum()) for g in group.values()))
        if norm > 0:
            direction |= {name: g / norm for name, g in group.items()}
    total = math.sqrt(sum(float(g.square().sum()) for g in direction.values()))
    return {name: g / total for name, g in direction.items()}


def _projections(
    engine: PrivacyEngine,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    loss: SampleLoss,
    direction: dict[str, Tensor],
    steps: int,
    micro_batch_size: int,
) -> Iterator[float]:
    """What each step releases in `direction`, as a sum over the batch, in units of max_grad_norm."""
    mechanism, device = engine.mechanism, next(engine.model.parameters()).device
    engine.model.train()
    for logical_batch in engine.batches(data, micro_batch_size, steps=steps):
        for x, y, weight_B in logical_batch:
            losses_B = loss(engine.model(x.to(device)), y.to(device)) * weight_B.to(device)
            (losses_B.mean() if mechanism.loss_reduction == "mean" else losses_B.sum()).backward()
        optimizer.step()
        mean = sum(
            float((whole(gradient).double() * direction[name]).sum())
            for name, gradient in gradients(engine.model).items()
            if name in direction
        )
        optimizer.zero_grad()
        yield mean * mechanism.schedule[logical_batch.step] / mechanism.max_grad_norm


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the trainable parameters by name."""
    return {name: p.grad for name, p in named_parameters(model).items() if p.requires_grad and p.grad is not None}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, without what wrappers add to names."""
    core = model.module if isinstance(model, DistributedDataParallel) else model
    return {canonical_name(name): p for name, p in core.named_parameters()}


def whole(x: Tensor) -> Tensor:
    """`x` itself, or all of a tensor that is sharded; then all ranks call it."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


def _play(without_NT: NDArray[np.float64], within_NT: NDArray[np.float64], mechanism: Mechanism) -> Trials:
    """Choose a test on the first fifth of the trials, and count its errors on the others."""
    ways = [lambda z_NT: log_likelihood_ratio(z_NT, mechanism)]
    if without_NT.shape[1] > 1:
        ways.append(lambda z_NT: np.ptp(z_NT, axis=1))
    head = len(without_NT) // 5
    best: tuple[float, Trials] | None = None
    for way in ways:
        without, within = way(without_NT), way(within_NT)
        threshold, promise = _threshold(without[:head], within[:head])
        if best is None or promise > best[0]:
            best = promise, _count(without[head:], within[head:], threshold)
    assert best is not None
    return best[1]


def log_likelihood_ratio(z_NT: NDArray[np.float64], mechanism: Mechanism) -> NDArray[np.float64]:
    """Of the releases z [N, T] of the canary's share: log of the density with it over that without it, [N]."""
    q = mechanism.schedule[0] / mechanism.sample_size
    gain_NT = (z_NT - 0.5) / mechanism.noise_multiplier**2
    return subsampled(gain_NT, q).sum(1)


def _threshold(without: NDArray[np.float64], within: NDArray[np.float64]) -> tuple[float, float]:
    """The threshold above which a score says "in" that proves most on these trials, and what it would prove."""
    values = np.unique(np.concatenate([without, within]))
    middles: Sequence[float] = [*((values[1:] + values[:-1]) / 2)] or [float(values[0])]
    thinned = middles[:: max(1, len(middles) // 100)]
    return max(((t, _count(without, within, t).mu(0.9)) for t in thinned), key=lambda found: found[1])


def _count(without: NDArray[np.float64], within: NDArray[np.float64], threshold: float) -> Trials:
    return Trials(int((without > threshold).sum()), len(without), int((within <= threshold).sum()), len(within))
