"""Options for correlated noise and its sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

from dpshard.accounting import SampledMechanism, calibrate, rounded_up
from dpshard.accounting.mechanism import independent_error
from dpshard.accounting.releases import SIMULATION_FAILURE
from dpshard.config import SamplingName, require_choice
from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF
from dpshard.noise.workloads import Workload

KINDS = {"banded-inverse": BandedInverse, "band-mf": BandMF}

AROUND = (1 / 4, 1 / 2, 1, 2, 4)
"""`auto` tries these multiples of epsilon sqrt(steps) / epochs as bands (McKenna et al. 2024, arXiv:2405.15913)."""


def parse(
    run: SampledMechanism,
    sampling: Any,
    name: str | None,
    bands: str | None,
    momentum: float | None,
    *,
    of_known_length: bool,
    target_epsilon: float | None,
    target_delta: float,
) -> SampledMechanism:
    """Return `run` with these options, or raise ConfigurationError."""
    require_choice("--sampling", sampling, get_args(SamplingName))
    if sampling != "poisson" and not of_known_length:
        raise ConfigurationError(
            f"--sampling {sampling}: the noise is planned for a run of known length. Give --epochs or --steps, and ask "
            f"for the noise or for epsilon."
        )
    if bands == "auto" and name not in (None, "none"):
        if target_epsilon is None:
            raise ConfigurationError("--bands auto compares noise at one epsilon: give --target-epsilon.")
        require_choice("--correlation", name, list(KINDS))
        steps, epochs = run.schedule.steps, run.schedule.steps * run.schedule[0] / run.sample_size
        most = min(steps, run.sample_size // run.schedule[0]) if name == "band-mf" else steps
        middle = target_epsilon * math.sqrt(steps) / max(1.0, epochs)
        tried = sorted({min(max(1, round(middle * factor)), most) for factor in AROUND})
        correlations = [correlation_of(name, str(bands), momentum) for bands in tried]
        runs = [replace(run, sampling=sampling, noise_correlation=correlation) for correlation in correlations]
        budget: Any = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        best = min(runs, key=lambda run: calibrate(run, **budget).error)
        return replace(best, noise_multiplier=run.noise_multiplier)
    return replace(run, sampling=sampling, noise_correlation=correlation_of(name, bands, momentum))


def correlation_of(
    name: str | None, bands: str | None, momentum: float | None, *, buffers: bool = False
) -> BandedInverse | BandMF | None:
    """Return the correlation, or raise ConfigurationError."""
    require_choice("--correlation", name, (None, "none", *KINDS))
    name = None if name == "none" else name
    if buffers and name != "band-mf":
        raise ConfigurationError("--buffers is for --correlation band-mf: add it, or leave --buffers out.")
    if (name is None) != (bands is None):
        raise ConfigurationError("--correlation and --bands go together: give both, or neither for independent noise.")
    if name is None or bands is None:
        if momentum is not None:
            raise ConfigurationError(
                f"--correlation-momentum {momentum:g} is for correlated noise: give --correlation, or leave it out."
            )
        return None
    if not bands.isdigit():
        raise ConfigurationError(f"--bands {bands}: give a number of bands, or auto with --target-epsilon.")
    facts: Any = {"bands": int(bands), "workload": None if momentum is None else Workload(momentum=momentum)}
    return KINDS[name](**facts, **({"buffers": True} if buffers else {}))


def error_over_dp_sgd(run: SampledMechanism, epsilon: float, **question: Any) -> float | None:
    """Return the error of prefix sums over that of DP-SGD."""
    if run.sampling == "poisson" or not 0 < epsilon < math.inf:
        return None
    plain = SampledMechanism(schedule=run.schedule, sample_size=run.sample_size)
    sigma = calibrate(plain, target_epsilon=epsilon, **question).noise_multiplier
    return run.error / independent_error(sigma, run.schedule.steps, run.workload)


def in_words(run: SampledMechanism, ratio: float) -> str:
    """Describe `error_over_dp_sgd`."""
    steps, sampled = run.schedule.steps, sum(run.schedule.sizes)
    it = "noise" if run.noise_correlation else "sampling"
    advice = f"this {it} pays" if ratio < 1 else "take --sampling poisson, which has less noise"
    if ratio >= 1 and run.sampling == "fixed-order":
        advice += ", or try cyclic-poisson with band-mf"
    what, hint, momentum = "", "", run.workload.momentum
    sums = f"a model under momentum {momentum:g}" if momentum else "sums of releases"
    if run.noise_correlation is not None:
        what = f"Correlation: {run.noise_correlation!r}. "
        hint = f" (Correlation pays for a large ε and few epochs; here {sampled / run.sample_size:.3g}.)"
    if run.sampling == "fixed-order":
        hint += " (If the data are read by index, compare --sampling balls-in-bins, which often has less noise.)"
    if run.sampling != "balls-in-bins" or run.noise_correlation is not None:
        moved = rounded_up(replace(run, noise_multiplier=1.0).sensitivity)
        what += (
            f"The independent noise has standard deviation σ · {moved} · max_grad_norm, for all participations of a "
            f"sample.\n"
        )
    if run.sampling == "balls-in-bins" and run.noise_correlation is not None:
        what += f"A public simulation bounds ε; δ includes {SIMULATION_FAILURE:g} for its failure.\n"
    return (
        f"{what}Noise in {sums}, root mean square over the {steps:,} steps: {ratio:.3f} of that of DP-SGD with Poisson "
        f"sampling at this ε: {advice}.{hint}"
    )
