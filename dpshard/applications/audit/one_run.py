"""The one-run audit: a training run with canaries, each in it or not by the toss of a fair coin, and who tells which.

[Note: Canaries]
Every canary has a row in the data set, so that the size of the data set tells nothing; the row of one that is out is a
blank, which contributes nothing, just as if it were not there. The adversary sees what every step releases (the noisy
sum that the optimizer gets) and all parameters, not the batches. Canaries are of two kinds.
- A gradient canary pulls at a number of its own, a row that is added to the model beside its own parameters, and at
  nothing else. So canaries disturb neither each other nor the model, and their scores are those of the mechanism alone:
  this attacks sampling, norms, clipping factors, noise and division, at any size and shard, and proves most.
- An input canary is a sample like any other, best like no other (random values, a random label), which pulls at the
  parameters of the model. Its score is the release along its own gradient, which plain autograd computes at every step.
  This attacks the rules of all layers as well. The samples beside them are blanks, too: what thousands of samples pull
  along a canary's gradient would drown the canary, and a guarantee holds for every data set.
Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", arXiv:2305.08846.
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
"""Norm of a gradient canary's gradient before clipping: far above any threshold, so that it is clipped to it."""

SMALL_DELTA = 1e-10
"""Where the guarantee of a run is held against the guesses: the theorem errs by a multiple of m delta, which has to be
below 1 - REFUTED_BEYOND."""


def toss_coins(canaries: int, secret: bytes) -> NDArray[np.bool_]:
    """Which canaries are in, [m]; `secret` has 32 bytes, from `new_run_secret`, and is not that of the run."""
    if not (is_count(canaries) and canaries >= 2):
        raise ConfigurationError(f"canaries={canaries!r}: an audit needs two of them at least, better hundreds.")
    return RandomSource(secret).uniform(canaries) <= 0.5


class GradientCanaries:
    """Canaries that pull at numbers of their own; see [Note: Canaries].

    Train what `wrap` returns on what `among` returns, with `losses`; call `observe` between `engine.privatize()` and
    `optimizer.step()`; then ask for `guesses`.
    """

    def __init__(self, included_m: NDArray[np.bool_], pull: float = PULL) -> None:
        self.included = included_m
        self.scores: NDArray[np.float64] = np.zeros(len(included_m))
        """What speaks for each canary's being in, [m]: the log likelihood ratio of the steps so far."""
        self.pull = pull
        """Norm of a gradient before clipping. Clipping that drops what is too long needs `below_threshold`."""
        self._next: tuple[float, ...] | None = None  # thresholds that the next release has, if they move

    def below_threshold(self, engine: PrivacyEngine) -> None:
        """Pull just below the threshold of the next step, for clipping that drops what is longer."""
        self.pull = JUST_BELOW * self._threshold(engine, engine.thresholds.values())

    def _threshold(self, engine: PrivacyEngine, thresholds: Iterable[float]) -> float:
        """Return the threshold of the group of the canaries' numbers."""
        groups = zip(engine.mechanism.clipping_groups, thresholds, strict=True)
        return next(threshold for names, threshold in groups if _Probed.NAME in names)

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` with the canaries' numbers beside it; its forward takes (x, canary [B]) and returns both outputs."""
        return _Probed(model, len(self.included))

    def among(self, dataset: Any) -> Dataset[Any]:
        """`dataset` of (x, y), and a row for every canary, as (x, y, canary, weight)."""
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
        """Look at the release of `step`, which is in the gradients; of every step, from the first one on."""
        mechanism, unit = engine.mechanism, noise_unit(engine, step)
        released = engine.internals.full_gradient(_Probed.NAME)
        if released is None:
            raise ConfigurationError("The canaries' numbers (probe.weight) were frozen: train them, too.")
        z_m = released[:-1, 0].double().cpu().numpy() * mechanism.schedule[step] / unit
        q, groups = mechanism.schedule[step] / mechanism.sample_size, len(mechanism.clipping_groups)
        first = [mechanism.max_grad_norm / math.sqrt(groups)] * groups
        shift = min(self.pull, self._threshold(engine, self._next or first)) / unit
        self._next = tuple(engine.thresholds.values())
        self.scores += log_likelihood_ratio(z_m, shift, q, max(mechanism.noise_multiplier, 1e-3))

    def guesses(self) -> Guesses:
        """Guess which canaries were in, and count who was right."""
        return guess(self.scores, self.included)


class InputCanaries:
    """Canaries that are samples (x [m, ...], y [m, ...]); see [Note: Canaries]. Used like GradientCanaries."""

    def __init__(self, included_m: NDArray[np.bool_], x: Tensor, y: Tensor, loss: SampleLoss) -> None:
        if not len(included_m) == len(x) == len(y):
            raise ConfigurationError(f"{len(included_m)} coins for {len(x)} inputs and {len(y)} targets of canaries.")
        self.included = included_m
        self.scores: NDArray[np.float64] = np.zeros(len(included_m))
        """What speaks for each canary's being in, [m]: the sum of its share of the releases, in units of the norm."""
        self._x, self._y, self._loss = x, y, loss
        self._reference: nn.Module | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` itself; a copy, which no engine and no sharding changes, is kept to differentiate."""
        self._reference = copy.deepcopy(model).train()
        return model

    def among(self, dataset: Any) -> Dataset[Any]:
        """Blanks for the samples (x, y) of `dataset`, and a row for every canary, as (x, y, canary, weight)."""
        m = len(self.included)
        rows = [(self._x[i], self._y[i], m, float(there)) for i, there in enumerate(self.included)]
        return _Rows(dataset, rows, none=m, weight=0.0)

    def losses(
        self, model: nn.Module, x: Tensor, y: Tensor, canary_B: Tensor, weight_B: Tensor, loss: SampleLoss
    ) -> Tensor:
        """Return the loss [B] of each row."""
        return weight_B * loss(model(x), y)

    def observe(self, engine: PrivacyEngine, step: int) -> None:
        """Look at the release of `step`, which is in the gradients, before the optimizer moves the parameters."""
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
        """Guess which canaries were in, and count who was right."""
        return guess(self.scores, self.included)


Canaries = GradientCanaries | InputCanaries


def refuted(guesses: Guesses, engine: PrivacyEngine) -> bool:
    """Whether a run proves more than its accounted epsilon; of a sound engine with 1 - REFUTED_BEYOND at most."""
    return guesses.epsilon(SMALL_DELTA, REFUTED_BEYOND) > engine.epsilon(SMALL_DELTA)


class _Probed(nn.Module):
    """A model, and beside it a number for each of m canaries, which no other sample touches."""

    NAME = "probe.weight"

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.probe = nn.Embedding(canaries + 1, 1, padding_idx=canaries, device=device)  # the last belongs to no canary
        nn.init.zeros_(self.probe.weight)

    def forward(self, x: Any, canary_B: Tensor) -> tuple[Any, Tensor]:
        return self.model(x), self.probe(canary_B).sum(1)  # not a view, which FSDP2 would warn of


class _Rows(Dataset[Any]):
    """The samples of a data set, then those of the canaries, as (x, y, canary, weight)."""

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
