"""The audit of releases: each must be a clipped sum plus the accounted noise (docs/audit.md).

[Note: Nearly without noise]
Plain autograd and the clipping function give the contributions c_i of samples. A release is sum_i b_i c_i + noise, with
b_i = 1 for drawn ones. At noise multiplier SIGMA, least squares find b. Then
- the residual, made independent, must be the accounted noise (noise.py);
- samples of this step and the one before must leave nothing along their contributions;
- the b must be drawn as accounted (draws.py).
If gradients are random or of half precision, all samples are blanks.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.accounting import SampledMechanism
from dpshard.applications.audit.bounds import FALSE_ALARM
from dpshard.applications.audit.canary import CanaryGradient, SampleLoss, sample_gradient, weighted_loss
from dpshard.applications.audit.draws import participation_findings
from dpshard.applications.audit.noise import Finding, NoiseTests, Whitening, likeliest_fault
from dpshard.applications.audit.steps import stepping
from dpshard.backends.ranks import Ranks
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.config import BatchSchedule, is_count, refuse_units
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.randomness import host_states, restore_host

SIGMA = 0.01
"""Far above the rounding of float32 sums."""
MOST_SAMPLES = 8
MOST_ELEMENTS = 2**26
FEWEST_STEPS = 16
HIDDEN_BEYOND = 0.05
"""Deviation at which some b_i of a thousand steps is wrong with probability 1e-20."""
SEED = 0


@dataclass(frozen=True, kw_only=True)
class ReleasesAudit:
    """Findings about releases."""

    findings: tuple[Finding, ...]
    steps: int
    elements: int
    samples: int
    """0 if only noise was tested."""

    @property
    def fault(self) -> Finding | None:
        """Likeliest fault; P <= FALSE_ALARM for a sound engine."""
        return likeliest_fault(list(self.findings), FALSE_ALARM)


def audit_releases(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: SampleLoss,
    *,
    steps: int = 200,
    micro_batch_size: int = 3,
    clipping_fn: str | ClippingFunction = "automatic",
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    on_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> ReleasesAudit:
    """Test the releases of `steps` steps, half of them of a second engine; see [Note: Nearly without noise].

    At most MOST_SAMPLES of the candidates `x`, `y` become the data set. Other arguments are those of `audit_steps`.
    Raises ConfigurationError for too few steps, or no candidate with a gradient.
    """
    if not (is_count(steps) and steps >= FEWEST_STEPS):
        raise ConfigurationError(f"steps={steps!r}: give at least {FEWEST_STEPS}, half of them for a second engine.")
    refuse_units(options, "audit_releases")
    rows, gradients, known = _known(copy.deepcopy(model).train(), x, y, loss)
    planned = _planned(len(rows), steps // 2, options)
    settings = {"steps": steps // 2, "clipping_fn": clipping_fn, "noise_multiplier": planned.noise_multiplier}
    settings |= {"batch_size": planned.schedule[0], "sample_size": planned.sample_size, **options}
    rows = [*rows, *rows[:1] * (planned.sample_size - len(rows))]
    data = TensorDataset(x[rows], y[rows], torch.arange(len(rows)))
    prepared = prepare(model)
    step = stepping(prepared)
    tests: NoiseTests | None = None
    game: _Game | None = None
    with _seeds_given_back():
        for _ in range(2):
            _seed()
            engine = PrivacyEngine(prepared, **settings)
            try:
                if game is None or tests is None:
                    game = _Game(engine, gradients, parse_clipping_fn(clipping_fn), options, known=known)
                    tests = NoiseTests(game.sizes)
                else:
                    game.next_engine(engine)
                    tests.next_engine()
                for noise, alone in game.play(prepared, data, loss, step, micro_batch_size):
                    tests.see(noise, alone=alone)
                    on_step()
            finally:
                engine.detach()
    assert game is not None
    assert tests is not None
    return ReleasesAudit(
        findings=(*game.findings(), *tests.findings()),
        steps=tests.steps,
        elements=sum(game.sizes.values()),
        samples=len(gradients) if game.known else 0,
    )


def _planned(candidates: int, steps: int, options: dict[str, Any]) -> SampledMechanism:
    sampling, correlation = options.get("sampling", "poisson"), options.get("noise_correlation")
    samples, size = candidates, max(1, candidates // 4)
    if sampling == "cyclic-poisson" and correlation is not None:
        samples = max(candidates, 2 * correlation.bands)
        size = samples // (2 * correlation.bands)
    schedule = BatchSchedule((size,) * steps)
    facts: dict[str, Any] = {"sample_size": samples, "sampling": sampling, "noise_correlation": correlation}
    planned = SampledMechanism(noise_multiplier=1.0, schedule=schedule, **facts)
    return replace(planned, noise_multiplier=SIGMA / planned.sensitivity)


def _known(plain: nn.Module, x: Tensor, y: Tensor, loss: SampleLoss) -> tuple[list[int], list[dict[str, Tensor]], bool]:
    elements = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    candidates = min(len(x), max(1, MOST_ELEMENTS // max(1, elements)))
    gradients = [sample_gradient(plain, x[i : i + 1], y[i : i + 1], loss) for i in range(candidates)]
    rows = _chosen(gradients)
    return rows, [gradients[row] for row in rows], _reproducible(plain, x[rows[:1]], y[rows[:1]], loss)


class _Game:
    def __init__(
        self,
        engine: PrivacyEngine,
        gradients: list[dict[str, Tensor]],
        function: ClippingFunction,
        options: dict[str, Any],
        *,
        known: bool,
    ) -> None:
        self.engine, self.gradients = engine, gradients
        tracking = options.get("adaptive_clipping")
        self._noise = SIGMA / math.sqrt(1 - tracking.budget_share) if tracking is not None else SIGMA
        names = [name for group in engine.mechanism.clipping_groups for name in group]
        self.sizes = {name: gradients[0][name].numel() for name in names}
        self._odd = [CanaryGradient(gradient, engine.mechanism.clipping_groups, function) for gradient in gradients]
        self._last: tuple[float, ...] | None = None
        self._drawn: list[list[NDArray[np.bool_]]] = [[]]
        n = len(gradients)
        self._left = {name: np.zeros((2, n)) for name in ("", *names)}
        """Residuals [2, n] along parts ("": in all parameters), with the sample and after."""
        self._times = np.zeros((2, n))
        self._whitening = self._of_correlation()
        self.known = known
        self._ranks = Ranks()
        self._disagreement = False
        if known:
            self._aim(self._thresholds())
            self.known = float(np.sqrt(np.diag(self._inverse)).max()) * self._noise < HIDDEN_BEYOND

    def next_engine(self, engine: PrivacyEngine) -> None:
        self.engine = engine
        self._drawn.append([])
        self._whitening = self._of_correlation()

    def _of_correlation(self) -> Whitening:
        mechanism = self.engine.mechanism
        return Whitening(mechanism.correlation, mechanism.schedule.steps)

    def play(
        self, model: nn.Module, data: TensorDataset, loss: SampleLoss, step: Callable[[], None], micro_batch_size: int
    ) -> Iterator[tuple[dict[str, NDArray[np.float64]], bool]]:
        """Yield noise over its deviation, and True if the release held only that."""
        mechanism, device = self.engine.mechanism, next(model.parameters()).device
        model.train()
        for logical_batch in self.engine.batches(data, micro_batch_size):
            self._aim(self._thresholds())
            for x, y, sample_B in logical_batch:
                losses_B = loss(model(x.to(device)), y.to(device))
                scale_B = self._pull_n[sample_B] * float(self.known)
                weighted_loss(losses_B, scale_B, mechanism.loss_reduction).backward()
            self.engine.privatize()
            scale = mechanism.schedule[logical_batch.step] / self._unit
            released = {name: self._released(name) * scale for name in self.sizes}
            self._compare_ranks(released, logical_batch.step)
            step()
            yield self._taken_apart(released)

    def _thresholds(self) -> tuple[float, ...]:
        mechanism = self.engine.mechanism
        if mechanism.adaptive_clipping is not None:
            return tuple(self.engine.thresholds.values())
        groups = len(mechanism.clipping_groups)  # as specified, whatever the engine has
        return (mechanism.max_grad_norm / math.sqrt(groups),) * groups

    def _aim(self, thresholds: tuple[float, ...]) -> None:
        if thresholds == self._last:
            return
        self._last, self._unit = thresholds, math.hypot(*thresholds)
        aims = [odd.aim(thresholds) for odd in self._odd]
        blanks = self.engine.mechanism.sample_size - len(aims)
        self._pull_n = torch.tensor([*(aim.pull for aim in aims), *[0.0] * blanks])
        parts = [odd.left_of(aim) for odd, aim in zip(self._odd, aims, strict=True)]
        self._parts = {
            name: np.stack([_flat(part[name]) if name in part else np.zeros(size) for part in parts]) / self._unit
            for name, size in self.sizes.items()
        }
        self._inverse = np.linalg.pinv(sum(part @ part.T for part in self._parts.values()))

    def _released(self, name: str) -> NDArray[np.float64]:
        gradient = self.engine.internals.full_gradient(name)
        return np.zeros(self.sizes[name]) if gradient is None else _flat(gradient)

    def _compare_ranks(self, released: dict[str, NDArray[np.float64]], step: int) -> None:
        if step in (0, 1) and not self._ranks.alone:
            digest = hashlib.sha256(b"".join(value.tobytes() for value in released.values())).hexdigest()
            self._disagreement |= len(set(self._ranks.gather(digest))) > 1

    def _taken_apart(self, released: dict[str, NDArray[np.float64]]) -> tuple[dict[str, NDArray[np.float64]], bool]:
        plain = self._whitening.is_plain
        if not self.known:
            return self._whitened(released), plain
        along_n = sum(self._parts[name] @ value for name, value in released.items())
        drawn_n = self._inverse @ along_n > 0.5
        noise = self._whitened({name: value - drawn_n @ self._parts[name] for name, value in released.items()})
        of_engine = self._drawn[-1]
        moments = np.stack([drawn_n, of_engine[-1] if of_engine else np.zeros_like(drawn_n)]).astype(float)
        whole = np.zeros(len(drawn_n))
        for name, value in noise.items():
            left_n = self._parts[name] @ value
            length_n = np.linalg.norm(self._parts[name], axis=1)
            self._left[name] += moments * np.divide(left_n, length_n, out=np.zeros_like(left_n), where=length_n > 0)
            whole += left_n
        self._left[""] += moments * whole / np.sqrt(sum((part**2).sum(1) for part in self._parts.values()))
        self._times += moments
        of_engine.append(drawn_n)
        return noise, plain and not drawn_n.any()

    def _whitened(self, noise: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
        independent = self._whitening.independent(noise)
        return {name: value / self._noise for name, value in independent.items()}

    def findings(self) -> list[Finding]:
        found = [Finding("ranks are given different gradients", -math.inf)] if self._disagreement else []
        if not self.known:
            return found
        for name, left in self._left.items():
            z = np.divide(left, np.sqrt(self._times), out=np.zeros_like(left), where=self._times > 0)
            for sort, what in enumerate(("not what clipping leaves", "what an earlier step released")):
                log_p = math.log(2 * z.shape[1]) + float(stats.norm.logsf(np.abs(z[sort]).max()))
                found.append(Finding(f"{name or 'a sample'}: the sum holds {what}", min(0.0, log_p)))
        drawn = [np.array(of_engine) for of_engine in self._drawn]
        return [*found, *participation_findings(drawn, self.engine.mechanism)]


def _chosen(gradients: list[dict[str, Tensor]]) -> list[int]:
    m = len(gradients)
    gram, parts = np.zeros((m, m)), []
    for name in gradients[0]:
        part = np.stack([_flat(gradient[name]) for gradient in gradients])
        gram += part @ part.T
        parts.append((part**2).sum(1))
    squares = np.array(parts).T
    norms = np.sqrt(squares.sum(1))
    usable = [i for i, norm in enumerate(norms) if 0 < norm < math.inf]
    if not usable:
        raise ConfigurationError("No candidate has a gradient: choose samples that the model can learn.")
    norms = np.maximum(norms, 1e-300)
    gram /= np.outer(norms, norms)
    share = np.sqrt(squares) / norms[:, None]
    chosen: list[int] = []
    while len(chosen) < MOST_SAMPLES:
        best, gain = -1, -1.0
        covered = share[chosen].max(0) if chosen else np.zeros(share.shape[1])
        for i in set(usable) - set(chosen):
            those = [*chosen, i]
            reached = float(np.sqrt(np.maximum(share[i], covered)).sum())
            if (
                reached > gain
                and np.diag(np.linalg.pinv(gram[np.ix_(those, those)])).max() < 9
                and (np.linalg.matrix_rank(gram[np.ix_(those, those)], tol=0.05) == len(those))
            ):
                best, gain = i, reached
        if best < 0:
            break
        chosen.append(best)
    return chosen


def _reproducible(model: nn.Module, x: Tensor, y: Tensor, loss: SampleLoss) -> bool:
    if any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters() if p.requires_grad):
        return False
    with _seeds_given_back():
        first, second = (sample_gradient(model, x, y, loss) for _ in range(2))
    return all(torch.allclose(g, second[name], rtol=1e-4, atol=1e-6) for name, g in first.items())


def _flat(value: Tensor) -> NDArray[np.float64]:
    return value.detach().double().flatten().cpu().numpy()


def _seed() -> None:
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002
    random.seed(SEED)


@contextmanager
def _seeds_given_back() -> Iterator[None]:
    states = host_states()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        restore_host(states)
