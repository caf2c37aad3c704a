"""Audits of a `dpshard train` configuration: its model, data, loss, engine and optimizer under attack."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from dpshard import PrivacyEngine
from dpshard.audit import Canaries, GradientCanaries, InputCanaries, StepsAudit, audit_steps, refuted, toss_coins
from dpshard.backends.ranks import Ranks
from dpshard.cli import fitting, models, sharding
from dpshard.cli.data import BYTES, Data, Kind, size
from dpshard.cli.settings import TrainSettings
from dpshard.cli.training import draw_seed, make_optimizer, make_scheduler, pick_device, sample_losses
from dpshard.errors import ConfigurationError
from dpshard.randomness import new_run_secret

NOISE = 0.5
"""Noise multiplier of the audited single step: where few trials prove much (see docs/audit.md)."""
ROWS = 4
"""Samples of the audited single step; in micro-batches of 3, so that some rows are padding."""
CANDIDATES = 32
"""Odd samples of which the one with the longest gradient is the canary of the single step."""


def audit_step(settings: TrainSettings, data: Data, trials: int, confidence: float) -> dict[str, Any]:
    """Many noisy releases of one step with and without an odd sample, as the figures of audit.json."""
    settings, device = fitting.fit(settings, data), pick_device(settings.device)
    model = _awake(_model(settings, data, device))
    canary_x, canary_y = _longest(model, *odd_samples(data, CANDIDATES))
    first = [data.train[i] for i in range(min(ROWS - 1, size(data.train)))]
    x = torch.stack([*(torch.as_tensor(x) for x, _ in first), canary_x])
    y = torch.stack([*(torch.as_tensor(y) for _, y in first), canary_y])
    options = settings.mechanism()
    kept = ("max_grad_norm", "clipping_fn", "clipping_style", "clipping_mode", "accountant", "secure_mode", "noise")
    audit = audit_steps(
        model,
        x,
        y,
        sample_losses,
        trials=trials,
        noise_multiplier=NOISE,
        target_delta=settings.target_delta,
        prepare=lambda model: (
            sharding.shard(model, settings.shard, device, lambda m: make_optimizer(m, settings)).model
        ),
        **{name: options[name] for name in kept},
    )
    return step_figures(audit, settings.target_delta, confidence)


def step_figures(audit: StepsAudit, delta: float, confidence: float) -> dict[str, Any]:
    """An audit of steps as plain values."""
    trials = audit.trials
    return {
        "lower_bound": audit.lower_bound(delta, confidence),
        "accounted": audit.accounted(delta),
        "delta": delta,
        "confidence": confidence,
        "noise_multiplier": audit.mechanism.noise_multiplier,
        "false_positives": trials.false_positives,
        "false_negatives": trials.false_negatives,
        "trials": trials.within + trials.without,
        "mu_lower_bound": trials.mu(confidence),
        "mu_accounted": audit.accounted_mu,
        "refuted": audit.refuted_at() is not None,
    }


def audit_run(
    settings: TrainSettings, data: Data, ranks: Ranks, kind: str, count: int, confidence: float, progress: Any = None
) -> dict[str, Any]:
    """A whole run with canaries, as the figures of audit.json; `progress(step, steps)` is called after each step.

    Noise is calibrated anew for the data set with the canaries, and epsilon is that of this run.
    """
    if settings.shard.startswith("deepspeed"):
        raise ConfigurationError("DeepSpeed keeps gradients to itself: audit the same settings with --shard fsdp2.")
    settings, device = fitting.fit(settings, data), pick_device(settings.device)
    included = ranks.on_first(lambda: toss_coins(count, new_run_secret()))
    canaries: Canaries
    if kind == "gradient":
        canaries = GradientCanaries(included)
    else:
        canaries = InputCanaries(included, *odd_samples(data, count), sample_losses)
    model = canaries.wrap(_model(settings, data, device))
    sharded = sharding.shard(model, settings.shard, device, lambda model: make_optimizer(model, settings))
    dataset = canaries.among(data.train)
    engine = PrivacyEngine(sharded.model, sample_size=size(dataset), **settings.mechanism())
    scheduler = make_scheduler(sharded.optimizer, settings, engine.steps)
    if isinstance(canaries, GradientCanaries) and settings.clipping_fn == "global":
        # It drops what is longer than the threshold of its group.
        canaries.pull = 0.99 * settings.max_grad_norm / math.sqrt(len(engine.mechanism.clipping_groups))
    for logical_batch in engine.batches(dataset, settings.micro_batch_size):
        sharded.model.train()
        for x, y, canary_B, weight_B in logical_batch:
            torch.manual_seed(draw_seed(settings.seed, logical_batch.step, logical_batch.position, ranks.rank))
            x, y, canary_B, weight_B = (part.to(device) for part in (x, y, canary_B, weight_B))
            canaries.losses(sharded.model, x, y, canary_B, weight_B, sample_losses).mean().backward()
        engine.privatize()
        canaries.observe(engine, logical_batch.step)
        sharded.step()
        scheduler.step()
        if progress is not None:
            progress(engine.step, engine.steps)
    return _run_figures(canaries, engine, kind, confidence)


def _run_figures(canaries: Canaries, engine: PrivacyEngine, kind: str, confidence: float) -> dict[str, Any]:
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
    """Samples like no others: the values of a training sample in random order, for text random bytes; random labels."""
    generator = torch.Generator().manual_seed(0)
    like = [torch.as_tensor(data.train[i % size(data.train)][0]) for i in range(count)]
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
    """The sample with the longest gradient."""
    plain, norms = copy.deepcopy(model).train(), []
    device = next(model.parameters()).device
    for i in range(len(x)):
        loss = sample_losses(plain(x[i : i + 1].to(device)), y[i : i + 1].to(device)).sum()
        parameters = [p for p in plain.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(sum(float(g.square().sum()) for g in found))
    best = max(range(len(norms)), key=norms.__getitem__)
    return x[best], y[best]


def _awake(model: nn.Module) -> nn.Module:
    """`model`, with small values in the place of parameters that are zero: a head of zeros passes no gradient on."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.05)
    return model


def _model(settings: TrainSettings, data: Data, device: torch.device) -> nn.Module:
    torch.manual_seed(settings.seed)
    return models.build(settings.model, data, settings).to(device)
