"""Our correlated noise beside jax-privacy's: sensitivity and error of the strategies that both libraries have.

`python -m benchmarks factorisations` needs jax-privacy, which nothing else needs: pip install jax-privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from dpshard.errors import ConfigurationError
from dpshard.noise.correlation import PREFIX_SUMS, BandedInverse, BandMF, Correlation, furthest_moves, inverse

CASES = (
    ("banded-inverse-square-root", 976, 256, 976),
    ("banded-inverse-square-root", 976, 16, 976),
    ("banded-inverse-square-root", 410, 16, 41),
    ("banded-inverse-square-root", 410, 64, 41),
    ("banded-inverse-square-root", 293, 4, 97),
    ("banded-inverse-square-root", 100, 1, 7),
    ("banded-inverse-square-root", 50, 50, 1),
    ("banded-square-root", 976, 256, 976),
    ("banded-square-root", 410, 16, 41),
    ("banded-square-root", 410, 64, 41),
    ("banded-square-root", 293, 8, 3),
    ("banded-optimised", 410, 16, 41),
    ("banded-optimised", 410, 41, 41),
    ("banded-optimised", 293, 4, 97),
    ("banded-optimised", 64, 64, 64),
)
"""Strategy, steps, bands, separation. In some the columns of two participations overlap."""
OPTIMISER_STEPS = 1000

Figures = dict[str, float]
"""`sensitivity` to contributions of norm 1, and `rmse` of prefix sums for noise of that sensitivity."""


def ours(strategy: str, steps: int, bands: int, separation: int) -> Figures:
    """Return our figures for our own coefficients."""
    root = BandedInverse(bands=bands)
    if strategy == "banded-inverse-square-root":
        return figures(root, steps, separation)
    if strategy == "banded-optimised":
        return figures(BandMF(bands=bands), steps, separation)
    coefficients = tuple(inverse(root.noising(bands), bands).tolist())
    return figures(BandMF(bands=bands, coefficients=coefficients), steps, separation)


def figures(correlation: Correlation, steps: int, separation: int) -> Figures:
    """Return our figures of `correlation`."""
    moved = float(furthest_moves(correlation.strategy(steps), separation)[-1])
    return {"sensitivity": moved, "rmse": moved * PREFIX_SUMS.error(correlation.noising(steps))}


def theirs(strategy: str, steps: int, bands: int, separation: int) -> tuple[Figures, list[float]]:
    """Return the figures of jax-privacy in float64, and its coefficients."""
    import jax
    from jax_privacy.matrix_factorization import toeplitz

    jax.config.update("jax_enable_x64", True)
    if strategy == "banded-inverse-square-root":
        # One more than we need: the last of them is that of a matrix which ends there.
        coefficients = toeplitz.optimal_max_error_noising_coefs(bands + 1)[:bands]
        column = toeplitz.inverse_coef(coefficients, steps)
    elif strategy == "banded-square-root":
        coefficients = column = toeplitz.optimal_max_error_strategy_coefs(bands)
    else:
        found = toeplitz.optimize_banded_toeplitz(steps, bands, max_optimizer_steps=OPTIMISER_STEPS)
        coefficients = column = found / found[0]
    squared = float(toeplitz.minsep_sensitivity_squared(column, separation, n=steps))
    error = float(toeplitz.per_query_error(strategy_coef=column, n=steps).mean())
    return {"sensitivity": math.sqrt(squared), "rmse": math.sqrt(squared * error)}, coefficients.tolist()


def compare() -> Iterator[dict[str, Any]]:
    """Yield all figures of every case, and the largest relative differences.

    The optimum of an optimised strategy is flat: its error is known to more digits than its coefficients. So there our
    functions also get the coefficients of jax-privacy. Raises ConfigurationError without jax-privacy.
    """
    try:
        metadata.version("jax-privacy")
    except metadata.PackageNotFoundError as error:
        raise ConfigurationError("This comparison needs jax-privacy: pip install jax-privacy.") from error
    for case in CASES:
        strategy, steps, bands, separation = case
        other, coefficients = theirs(*case)
        row: dict[str, Any] = dict(zip(("strategy", "steps", "bands", "separation"), case, strict=True))
        row |= {"participations": math.ceil(steps / separation), "dpshard": ours(*case), "jax_privacy": other}
        row["differences"] = differences(row["dpshard"], other)
        if strategy == "banded-optimised":
            same = figures(BandMF(bands=bands, coefficients=tuple(coefficients)), steps, separation)
            row |= {"coefficients_of_jax_privacy": coefficients, "differences_there": differences(same, other)}
        yield row


def differences(mine: Mapping[str, float], other: Mapping[str, float]) -> Figures:
    """Return the relative difference of each figure."""
    return {name: abs(mine[name] / other[name] - 1) for name in other}


def versions() -> dict[str, str]:
    """Return the versions that decide the figures of jax-privacy."""
    return {name: metadata.version(name) for name in ("jax", "jax-privacy")}
