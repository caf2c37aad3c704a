"""The one-run audit: guess which canaries, each in by a fair coin, a training run contained (docs/audit.md).

[Note: Canaries]
Every canary has a row in the data set, so the size reveals nothing. The row of an excluded canary is a blank, which
contributes nothing. The adversary sees all releases and parameters, but not the batches.
- A gradient canary pulls only at its own number, a row beside the model's parameters. So canaries disturb neither each
  other nor the model, and scores depend only on the mechanism.
- An input canary is a sample that pulls at the model's parameters. Its score is the release along its gradient from
  plain autograd. All other samples are blanks, because thousands of them would drown it; a guarantee holds for every
  data set.
Steinke, Nasr and Jagielski 2023, arXiv:2305.08846.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpshard.applications.audit.bounds import REFUTED_BEYOND, Guesses, guess
from dpshard.applications.audit.canary import JUST_BELOW, SampleLoss, named_parameters, norm_of, sample_gradient
from dpshard.applications.audit.steps import log_likelihood_ratio, noise_unit
from dpshard.config import is_count
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource

PULL = 1e4
"""Gradient norm of a gradient canary before clipping, far above any threshold."""

SMALL_DELTA = 1e-10
"""Delta of `refuted`: the theorem's error, a multiple of m delta, must be below 1 - REFUTED_BEYOND."""


def toss_coins(canaries: int, secret: bytes) -> NDArray[np.bool_]:
    """Return the canaries that are in, bool [m]; `secret` is 32 bytes of `new_run_secret`, not the run's."""
    if not (is_count(canaries) and canaries >= 2):
        raise ConfigurationError(f"canaries={canaries!r}: an audit needs at least 2, and hundreds prove more.")
    return RandomSource(secret).uniform(canaries) <= 0.5


class GradientCanaries:
    """Canaries that pull at their own numbers; see [Note: Canaries].

    Train `wrap(model)` on `among(dataset)` with `losses`. Call `observe` between `engine.privatize()` and
    `optimizer.step()`, and `guesses` at the end.
    """

    def __init__(self, included_m: NDArray[np.bool_]) -> None:
        self.included = included_m
        self.scores: NDArray[np.float64] = np.zeros(len(included_m))
        """Log likelihood ratio of "in" over "out" so far, [m]."""
        self.pull = PULL
        """Gradient norm before clipping."""
        self._next: tuple[float, ...] | None = None  # thresholds of the next release

    def below_threshold(self, engine: PrivacyEngine) -> None:
        """Pull just below the next threshold, for clipping that drops longer gradients."""
        self.pull = JUST_BELOW * self._threshold(engine, engine.thresholds.values())

    def _threshold(self, engine: PrivacyEngine, thresholds: Iterable[float]) -> float:
        groups = zip(engine.mechanism.clipping_groups, thresholds, strict=True)
        return next(threshold for names, threshold in groups if _Probed.NAME in names)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model` with the canaries' numbers: forward takes (x, canary [B]) and returns both outputs."""
        return _Probed(model, len(self.included))

    def among(self, dataset: Any) -> Dataset[Any]:
        """Return the samples of `dataset`, then the canaries, as (x, y, canary, weight)."""
        x, y = dataset[0]
        m = len(self.included)
        return _Rows(
            dataset, [(x, y, i if there else m, 0.0) for i, there in enumerate(self.included)], none=m, weight=1.0
        )

    def losses(
        self, model: nn.Module, x: Tensor, y: Tensor, canary_B: Tensor, weight_B: Tensor, loss: SampleLoss
    ) -> Tensor:
        """Return the loss [B] of each row."""
        output, probe_B = model(x, canary_B)
        return weight_B * loss(output, y) + self.pull * probe_B

    def observe(self, engine: PrivacyEngine, step: int) -> None:
        """Score the release of `step` in the gradients; call it at every step."""
        mechanism, unit = engine.mechanism, noise_unit(engine, step)
        released = engine.internals.full_gradient(_Probed.NAME)
        if released is None:
            raise ConfigurationError("The canaries' numbers (probe.weight) are frozen: call requires_grad_(True).")
        z_m = released[:-1, 0].double().cpu().numpy() * mechanism.schedule[step] / unit
        q, groups = mechanism.schedule[step] / mechanism.sample_size, len(mechanism.clipping_groups)
        first = [mechanism.max_grad_norm / math.sqrt(groups)] * groups
        shift = min(self.pull, self._threshold(engine, self._next or first)) / unit
        self._next = tuple(engine.thresholds.values())
        self.scores += log_likelihood_ratio(z_m, shift, q, max(mechanism.noise_multiplier, 1e-3))

    def guesses(self) -> Guesses:
        """Guess which canaries were in."""
        return guess(self.scores, self.included)


class InputCanaries:
    """Canaries that are samples (x [m, ...], y [m, ...]); see [Note: Canaries] and GradientCanaries."""

    def __init__(self, included_m: NDArray[np.bool_], x: Tensor, y: Tensor, loss: SampleLoss) -> None:
        if not len(included_m) == len(x) == len(y):
            raise ConfigurationError(
                f"{len(included_m)} coins for {len(x)} inputs and {len(y)} targets: give one of each per canary."
            )
        self.included = included_m
        self.scores: NDArray[np.float64] = np.zeros(len(included_m))
        """Noisy sums along each canary's unit gradient over `noise_unit`, summed over steps, [m]."""
        self._x, self._y, self._loss = x, y, loss
        self._reference: nn.Module | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, and keep a plain copy to differentiate."""
        self._reference = copy.deepcopy(model).train()
        return model

    def among(self, dataset: Any) -> Dataset[Any]:
        """Return a blank per sample of `dataset`, then the canaries, as (x, y, canary, weight)."""
        m = len(self.included)
        rows = [(self._x[i], self._y[i], m, float(there)) for i, there in enumerate(self.included)]
        return _Rows(dataset, rows, none=m, weight=0.0)

    def losses(
        self, model: nn.Module, x: Tensor, y: Tensor, canary_B: Tensor, weight_B: Tensor, loss: SampleLoss
    ) -> Tensor:
        """Return the loss [B] of each row."""
        return weight_B * loss(model(x), y)

    def observe(self, engine: PrivacyEngine, step: int) -> None:
        """Score the release of `step` in the gradients, before the optimizer's step."""
        reference = self._reference
        if reference is None:
            raise ConfigurationError("Input canaries differentiate a copy of the model: call wrap(model) beforehand.")
        mechanism = engine.mechanism
        own = named_parameters(reference)
        names = [name for group in mechanism.clipping_groups for name in group]
        with torch.no_grad():
            for name in names:
                own[name].copy_(engine.internals.full_value(name))
        full = {name: engine.internals.full_gradient(name) for name in names}
        released = {name: g for name, g in full.items() if g is not None}
        unit = noise_unit(engine, step)
        z_m = np.zeros(len(self.scores))
        for i in range(len(z_m)):
            found = sample_gradient(reference, self._x[i : i + 1], self._y[i : i + 1], self._loss)
            along = sum(float((found[name] * g).sum()) for name, g in released.items())
            norm = norm_of(found[name] for name in released)
            z_m[i] = along / norm * mechanism.schedule[step] / unit if norm > 0 else 0.0
        self.scores += z_m

    def guesses(self) -> Guesses:
        """Guess which canaries were in."""
        return guess(self.scores, self.included)


Canaries = GradientCanaries | InputCanaries


def refuted(guesses: Guesses, engine: PrivacyEngine) -> bool:
    """Return True if a run proves more than its accounted epsilon; P <= 1 - REFUTED_BEYOND for a sound engine."""
    return guesses.epsilon(SMALL_DELTA, REFUTED_BEYOND) > engine.epsilon(SMALL_DELTA)


class _Probed(nn.Module):
    """A model, with a number for each of m canaries that only this canary moves."""

    NAME = "probe.weight"

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.probe = nn.Embedding(canaries + 1, 1, padding_idx=canaries, device=device)  # the last belongs to no canary
        nn.init.zeros_(self.probe.weight)

    def forward(self, x: Any, canary_B: Tensor) -> tuple[Any, Tensor]:
        return self.model(x), self.probe(canary_B).sum(1)  # not a view: FSDP2 would warn


class _Rows(Dataset[Any]):
    """Samples of a data set, then canaries, as (x, y, canary, weight)."""

    def __init__(self, dataset: Any, canaries: list[tuple[Any, Any, int, float]], *, none: int, weight: float) -> None:
        self.dataset = dataset
        self.canaries = canaries
        self.none = none
        self.weight = weight

    def __len__(self) -> int:
        return len(self.dataset) + len(self.canaries)

    def __getitem__(self, index: int) -> tuple[Any, Any, int, np.float32]:
        if index >= len(self.dataset):
            x, y, canary, weight = self.canaries[index - len(self.dataset)]
            return x, y, canary, np.float32(weight)
        x, y = self.dataset[index]
        return x, y, self.none, np.float32(self.weight)
