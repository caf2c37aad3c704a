"""The one-run audit (docs/audit.md): Steinke, Nasr and Jagielski 2023, arXiv:2305.08846.

An excluded canary is a blank row, so the size reveals nothing. A gradient canary pulls only at its own number, so
canaries do not disturb each other. An input canary pulls at the model's parameters; other samples are blanks, because
thousands would drown it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpshard.applications.audit.bounds import REFUTED_BEYOND, Guesses, guess
from dpshard.applications.audit.canary import JUST_BELOW, SampleLoss, named_parameters, norm_of, sample_gradient
from dpshard.applications.audit.steps import by_coin, noise_unit
from dpshard.config import is_count
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource

PULL = 1e4

SMALL_DELTA = 1e-10
"""m delta must be far below 1 - REFUTED_BEYOND."""


def toss_coins(canaries: int, secret: bytes) -> NDArray[np.bool_]:
    """Return who is in, bool [m], by a `secret` that is not the run's."""
    if not (is_count(canaries) and canaries >= 2):
        raise ConfigurationError(f"canaries={canaries!r}: an audit needs at least 2, and hundreds prove more.")
    return RandomSource(secret).uniform(canaries) <= 0.5


class _Scored:
    def __init__(self, included_m: NDArray[np.bool_]) -> None:
        self.included = included_m
        self.scores: NDArray[np.float64] = np.zeros(len(included_m))

    def guesses(self) -> Guesses:
        return guess(self.scores, self.included)


class GradientCanaries(_Scored):
    """Canaries that pull at their own numbers.

    Train `wrap(model)` on `among(dataset)` with `losses`. Call `observe` between `engine.privatize()` and
    `optimizer.step()`, and `guesses` at the end.
    """

    def __init__(self, included_m: NDArray[np.bool_]) -> None:
        super().__init__(included_m)
        self.pull = PULL
        self._next: tuple[float, ...] | None = None

    def below_threshold(self, engine: PrivacyEngine) -> None:
        """Pull just below the next threshold."""
        self.pull = JUST_BELOW * self._threshold(engine, engine.thresholds.values())

    def _threshold(self, engine: PrivacyEngine, thresholds: Iterable[float]) -> float:
        groups = zip(engine.mechanism.clipping_groups, thresholds, strict=True)
        return next(threshold for names, threshold in groups if _Probed.NAME in names)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose forward takes (x, canary [B])."""
        return _Probed(model, len(self.included))

    def among(self, dataset: Any) -> Dataset[Any]:
        """Return `dataset` and the canaries, as (x, y, canary, weight)."""
        x, y = dataset[0]
        m = len(self.included)
        return _Rows(
            dataset, [(x, y, i if there else m, 0.0) for i, there in enumerate(self.included)], none=m, weight=1.0
        )

    def losses(
        self, model: nn.Module, x: Tensor, y: Tensor, canary_B: Tensor, weight_B: Tensor, loss: SampleLoss
    ) -> Tensor:
        """Return losses [B]."""
        output, probe_B = model(x, canary_B)
        return weight_B * loss(output, y) + self.pull * probe_B

    def observe(self, engine: PrivacyEngine, step: int) -> None:
        """Score the release of `step`; call it at every step."""
        mechanism, unit = engine.mechanism, noise_unit(engine, step)
        released = engine.internals.full_gradient(_Probed.NAME)
        if released is None:
            raise ConfigurationError("The canaries' numbers (probe.weight) are frozen: call requires_grad_(True).")
        z_m = released[:-1, 0].double().cpu().numpy() * mechanism.schedule[step] / unit
        q, groups = mechanism.schedule[step] / mechanism.sample_size, len(mechanism.clipping_groups)
        first = [mechanism.max_grad_norm / math.sqrt(groups)] * groups
        shift = min(self.pull, self._threshold(engine, self._next or first)) / unit
        self._next = tuple(engine.thresholds.values())
        self.scores += by_coin(q, (z_m - shift / 2) * shift / max(mechanism.noise_multiplier, 1e-3) ** 2)


class InputCanaries(_Scored):
    """Canaries that are samples (x [m, ...], y [m, ...]), used as GradientCanaries."""

    def __init__(self, included_m: NDArray[np.bool_], x: Tensor, y: Tensor, loss: SampleLoss) -> None:
        if not len(included_m) == len(x) == len(y):
            raise ConfigurationError(
                f"{len(included_m)} coins for {len(x)} inputs and {len(y)} targets: give one of each per canary."
            )
        super().__init__(included_m)
        self._x, self._y, self._loss = x, y, loss
        self._reference: nn.Module | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, after copying it."""
        self._reference = copy.deepcopy(model).train()
        return model

    def among(self, dataset: Any) -> Dataset[Any]:
        """Return blanks and the canaries, as (x, y, canary, weight)."""
        m = len(self.included)
        rows = [(self._x[i], self._y[i], m, float(there)) for i, there in enumerate(self.included)]
        return _Rows(dataset, rows, none=m, weight=0.0)

    def losses(
        self, model: nn.Module, x: Tensor, y: Tensor, canary_B: Tensor, weight_B: Tensor, loss: SampleLoss
    ) -> Tensor:
        """Return losses [B]."""
        return weight_B * loss(model(x), y)

    def observe(self, engine: PrivacyEngine, step: int) -> None:
        """Score the release of `step`."""
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


Canaries = GradientCanaries | InputCanaries


def refuted(guesses: Guesses, engine: PrivacyEngine) -> bool:
    """Return True if a run proves more than its epsilon (P <= 1 - REFUTED_BEYOND if it is sound)."""
    return guesses.epsilon(SMALL_DELTA, REFUTED_BEYOND) > engine.epsilon(SMALL_DELTA)


class _Probed(nn.Module):
    NAME = "probe.weight"

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.probe = nn.Embedding(canaries + 1, 1, padding_idx=canaries, device=device)
        nn.init.zeros_(self.probe.weight)

    def forward(self, x: Any, canary_B: Tensor) -> tuple[Any, Tensor]:
        return self.model(x), self.probe(canary_B).sum(1)  # not a view: FSDP2 would warn


@dataclass(eq=False)
class _Rows(Dataset[Any]):
    dataset: Any
    canaries: list[tuple[Any, Any, int, float]]
    none: int
    weight: float

    def __len__(self) -> int:
        return len(self.dataset) + len(self.canaries)

    def __getitem__(self, index: int) -> tuple[Any, Any, int, np.float32]:
        if index >= len(self.dataset):
            x, y, canary, weight = self.canaries[index - len(self.dataset)]
            return x, y, canary, np.float32(weight)
        x, y = self.dataset[index]
        return x, y, self.none, np.float32(self.weight)
