"""Options for noise that is correlated over steps, and its sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from dpshard.accounting import SampledMechanism, calibrate, rounded_up
from dpshard.accounting.mechanism import independent_error
from dpshard.config import SamplingName, check_choice
from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import BandedInverse, BandMF

KINDS = {"banded-inverse": BandedInverse, "band-mf": BandMF}

Sampling = Annotated[
    str,
    typer.Option(
        help="poisson; fixed-order: every sample once an epoch, in one order; or cyclic-poisson, with band-mf."
    ),
]
Name = Annotated[
    str | None, typer.Option(help="Noise that is correlated over steps: banded-inverse or band-mf, with --bands.")
]
Bands = Annotated[int | None, typer.Option(help="Number of bands of --correlation.")]


def parse(
    run: SampledMechanism, sampling: str, name: str | None, bands: int | None, *, of_known_length: bool
) -> SampledMechanism:
    """Return `run` with this sampling and correlation; raise ConfigurationError for pairs that cannot be analysed."""
    check_choice("--sampling", sampling, get_args(SamplingName))
    if sampling != "poisson" and not of_known_length:
        raise ConfigurationError(
            f"--sampling {sampling}: the noise is planned for a run of known length. Give --epochs or --steps, and ask "
            f"for the noise or for epsilon."
        )
    return replace(run, sampling=sampling, noise_correlation=correlation_of(name, bands))


def correlation_of(name: str | None, bands: int | None) -> BandedInverse | BandMF | None:
    """Return the correlation of these options; raise ConfigurationError if they are incomplete or unknown."""
    check_choice("--correlation", name, (None, *KINDS))
    if (name is None) != (bands is None):
        raise ConfigurationError("--correlation and --bands go together: give both, or neither for independent noise.")
    return None if name is None or bands is None else KINDS[name](bands=bands)


def error_over_dp_sgd(run: SampledMechanism, epsilon: float, **question: Any) -> float | None:
    """Return the error of prefix sums over that of DP-SGD (Poisson) at `epsilon`; None for DP-SGD."""
    if run.sampling == "poisson" or not 0 < epsilon < math.inf:
        return None
    plain = SampledMechanism(schedule=run.schedule, sample_size=run.sample_size)
    sigma = calibrate(plain, target_epsilon=epsilon, **question).noise_multiplier
    return run.error / independent_error(sigma, run.schedule.steps)


def in_words(run: SampledMechanism, ratio: float) -> str:
    """Describe `error_over_dp_sgd` and the noise multiplier."""
    steps, sampled = run.schedule.steps, sum(run.schedule.sizes)
    advice = "this noise pays" if ratio < 1 else "take --sampling poisson, which has less noise"
    return (
        f"The independent noise under the correlation has standard deviation σ · {rounded_up(run.sensitivity)} · "
        f"max_grad_norm.\nNoise in sums of releases, root mean square over the {steps:,} steps: {ratio:.3f} of that of "
        f"DP-SGD with Poisson sampling at this ε: {advice}. (Correlation pays for a large ε and few epochs; here "
        f"{sampled / run.sample_size:.3g}.)"
    )
