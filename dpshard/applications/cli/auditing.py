"""Audits of a `dpshard train` configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.applications.audit import (
    Canaries,
    GradientCanaries,
    InputCanaries,
    audit_releases,
    audit_runs,
    audit_steps,
    refuted,
    toss_coins,
)
from dpshard.applications.audit.canary import norm_of, sample_gradient
from dpshard.applications.audit.releases import SIGMA
from dpshard.applications.cli.data import BYTES, Data, Kind
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.cli.sharding import shard
from dpshard.applications.cli.training import Run, build_model, draw_seed, own_device
from dpshard.backends.ranks import Ranks
from dpshard.losses import sample_losses
from dpshard.randomness import new_run_secret

CANDIDATES = 32

INPUT_SIZES = (0.0, 0.3, 1.0, 3.0)
"""Factors of unusual inputs, in turn."""

OF_A_GAME = ("batch_size", "max_batch_size", "noise_multiplier", "target_epsilon", "epochs", "steps")


@dataclass(frozen=True, kw_only=True)
class Game:
    """Steps to play with and without an unusual sample."""

    steps: int = 1
    rows: int = 4
    batch_size: int
    """Expected."""
    noise_multiplier: float
    micro_batch_size: int
    """Less than `rows`, for padding."""


def games(steps: int, settings: TrainSettings) -> dict[str, Game]:
    """Return games by their keys in audit.json.

    Little noise shows faults of sampling, much noise re-used noise.
    """
    if steps == 1:
        return {"step": Game(batch_size=4, noise_multiplier=0.5, micro_batch_size=3)}
    several: dict[str, Any] = {"steps": steps, "micro_batch_size": 2}
    if settings.sampling == "fixed-order":
        # The unusual sample takes part several times.
        return {"runs": Game(rows=max(2, steps // 4), batch_size=1, noise_multiplier=0.5, **several)}
    if settings.sampling == "cyclic-poisson":
        rows = 2 * _bands(settings, steps // 2)
        return {
            "sampling": Game(rows=rows, batch_size=1, noise_multiplier=0.2, **several),
            "noise": Game(rows=rows, batch_size=1, noise_multiplier=2.0, **several),
        }
    return {
        # A shuffled loader shows every sample for certain.
        "sampling": Game(rows=steps, batch_size=1, noise_multiplier=0.2, **several),
        "noise": Game(batch_size=2, noise_multiplier=2.0, **several),
    }


def _bands(settings: TrainSettings, most: int) -> int:
    return max(1, min(int(settings.bands or 1), most))


def audit_game(
    game: Game,
    settings: TrainSettings,
    data: Data,
    ranks: Ranks,
    trials: int,
    confidence: float,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Play releases with and without an unusual sample; return figures of audit.json."""
    device = own_device(settings, ranks)
    model = _awake(build_model(settings, data, device, ranks))
    canary_x, canary_y = _longest(model, *odd_samples(data, CANDIDATES))
    first = [data.train[i % len(data.train)] for i in range(game.rows - 1)]
    x = torch.stack([*(torch.as_tensor(x) for x, _ in first), canary_x])
    y = torch.stack([*(torch.as_tensor(y) for _, y in first), canary_y])
    # Each group has two turns.
    options = _of_engine(settings, device, game.steps // (2 if settings.sampling == "cyclic-poisson" else 1))
    names = ("steps", "batch_size", "micro_batch_size", "noise_multiplier")
    options |= {name: getattr(game, name) for name in names} | {"trials": trials, "on_step": on_step}
    attack = audit_steps if settings.sampling == "poisson" else audit_runs
    audit = attack(model, x, y, sample_losses, **options)
    played, delta = audit.trials, settings.target_delta
    return {
        "lower_bound": audit.lower_bound(delta, confidence),
        "accounted": audit.accounted(delta),
        "delta": delta,
        "confidence": confidence,
        "noise_multiplier": audit.mechanism.noise_multiplier,
        "steps": audit.steps,
        "sampling": audit.mechanism.sampling,
        "batch_size": audit.mechanism.schedule[0],
        "sample_size": audit.mechanism.sample_size,
        "false_positives": played.false_positives,
        "false_negatives": played.false_negatives,
        "trials": played.within + played.without,
        "mu_lower_bound": played.mu(confidence),
        "mu_accounted": audit.accounted_mu,
        "refuted": audit.refuted_at() is not None,
    }


def audit_all_releases(
    settings: TrainSettings, data: Data, ranks: Ranks, steps: int, on_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Take releases apart; return figures of audit.json."""
    device = own_device(settings, ranks)
    model = _awake(build_model(settings, data, device, ranks))
    x, y = odd_samples(data, CANDIDATES // 2)
    if x.is_floating_point():
        # Biases have most of a small input's gradient.
        sizes = torch.tensor(INPUT_SIZES).repeat(len(x))[: len(x)]
        x = x * sizes.view(-1, *[1] * (x.ndim - 1))
    options = _of_engine(settings, device, steps // 2)
    audit = audit_releases(model, x, y, sample_losses, steps=steps, on_step=on_step, **options)
    fault = audit.fault
    return {
        "fault": None if fault is None else fault.what,
        "steps": audit.steps,
        "samples": audit.samples,
        "elements": audit.elements,
        "tests": len(audit.findings),
        "noise_multiplier": SIGMA,
        "refuted": fault is not None,
    }


def _of_engine(settings: TrainSettings, device: torch.device, most_bands: int) -> dict[str, Any]:
    kept = {name: value for name, value in settings.mechanism().items() if name not in OF_A_GAME}
    if kept["noise_correlation"] is not None:
        kept["noise_correlation"] = replace(kept["noise_correlation"], bands=_bands(settings, most_bands))
    return {"prepare": lambda model: shard(model, settings, device).model} | kept


def audit_run(
    settings: TrainSettings,
    data: Data,
    ranks: Ranks,
    kind: str,
    count: int,
    confidence: float,
    on_step: Callable[[int], object] = lambda steps: None,
) -> dict[str, Any]:
    """Train a run with canaries, to which epsilon applies; return figures of audit.json."""
    included = ranks.on_first(lambda: toss_coins(count, new_run_secret()))
    canaries: Canaries
    if kind == "gradient":
        canaries = GradientCanaries(included)
    else:
        canaries = InputCanaries(included, *odd_samples(data, count), sample_losses)
    run = Run.prepare(settings, replace(data, train=canaries.among(data.train)), ranks, canaries.wrap)
    engine, sharded = run.engine, run.sharded
    for logical_batch in engine.batches(run.data.train, settings.micro_batch_size):
        sharded.model.train()
        if isinstance(canaries, GradientCanaries) and settings.clipping_fn == "global":
            canaries.below_threshold(engine)  # it drops longer gradients
        for x, y, canary_B, weight_B in logical_batch:
            torch.manual_seed(draw_seed(settings.seed, logical_batch.step, logical_batch.position, ranks.rank))
            x, y, canary_B, weight_B = (part.to(run.device) for part in (x, y, canary_B, weight_B))
            canaries.losses(sharded.model, x, y, canary_B, weight_B, sample_losses).mean().backward()
        engine.privatize()
        canaries.observe(engine, logical_batch.step)
        sharded.step()
        run.scheduler.step()
        on_step(engine.steps)
    delta, guesses = engine.mechanism.target_delta, canaries.guesses()
    return {
        "lower_bound": guesses.epsilon(delta, confidence),
        "accounted": engine.epsilon(),
        "delta": delta,
        "confidence": confidence,
        "kind": kind,
        "canaries": guesses.canaries,
        "guesses": [list(tried) for tried in guesses.tried],
        "steps": engine.step,
        "noise_multiplier": engine.noise_multiplier,
        "sample_size": engine.mechanism.sample_size,
        "refuted": refuted(guesses, engine),
    }


def odd_samples(data: Data, count: int) -> tuple[Tensor, Tensor]:
    """Return shuffled values of samples, or random bytes, with random labels."""
    generator = torch.Generator().manual_seed(0)
    like = [torch.as_tensor(data.train[i % len(data.train)][0]) for i in range(count)]
    if data.kind in (Kind.LANGUAGE, Kind.MASKED):
        ids = torch.randint(BYTES, (count, len(like[0]) + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    if data.kind is Kind.TEXT:
        x = torch.randint(BYTES, (count, len(like[0])), generator=generator)
    else:
        orders = (torch.randperm(x.numel(), generator=generator) for x in like)
        x = torch.stack([x.flatten()[order].view_as(x) for x, order in zip(like, orders, strict=True)])
    return x, torch.randint(data.classes, (count,), generator=generator)


def _longest(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    plain = copy.deepcopy(model).train()
    samples = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    norms = [norm_of(sample_gradient(plain, *sample, sample_losses).values()) for sample in samples]
    best = max(range(len(norms)), key=norms.__getitem__)
    return x[best], y[best]


def _awake(model: nn.Module) -> nn.Module:
    """Fill zero parameters, because a head of zeros blocks gradients."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.05)
    return model
