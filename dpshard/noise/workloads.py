"""The total noise of a run, and the banded factorisation that minimises it. No torch in here.

SGD with momentum and decoupled weight decay turns gradients g into sums A g. The Toeplitz matrix A has the series 1 /
((1 - (1 - decay) x) (1 - momentum x)). The error is the root mean square over the steps of the norms of rows of A W.

Coefficients of W or C minimise this error times the sensitivity of C. The search starts from the root of A, cut to its
bands (Henzinger and Upadhyay 2022, arXiv:2202.11205). Gradients are exact: for y = 1 / x, dy = -y * y * dx.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpshard.config import is_number
from dpshard.errors import ConfigurationError

Series = NDArray[np.float64]
"""First column [T] of a lower triangular Toeplitz matrix."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sums of gradients in a model, for which noise is optimised."""

    momentum: float = 0.0
    """Momentum of the optimizer, 0 to 1."""
    decay: float = 0.0
    """Learning rate times weight decay, 0 to 1."""

    def __post_init__(self) -> None:
        for name, value in (("momentum", self.momentum), ("decay", self.decay)):
            if not (is_number(value) and 0 <= value < 1):
                raise ConfigurationError(f"Workload({name}={value!r}): it must be a number, at least 0 and below 1.")

    def sums(self, series: Series) -> Series:
        """Return A applied to a series [T]."""
        keep = 1.0 - self.decay
        return _recursion([1.0, -(keep + self.momentum), keep * self.momentum], series)

    def error(self, noising: Series) -> float:
        """Return the root mean square of the noise in the model, for z of norm 1."""
        return math.sqrt(float(np.mean(np.cumsum(self.sums(noising) ** 2))))

    def root(self, n: int) -> Series:
        """Return the first `n` coefficients of 1 / A^(1/2)."""
        powers = np.arange(n)
        decaying, moving = (_root_weights(n) * base**powers for base in (1.0 - self.decay, self.momentum))
        return cast(Series, np.convolve(decaying, moving)[:n])


def inverse(series: Series, steps: int) -> Series:
    """Return the first `steps` coefficients of 1 / `series`, which begins with 1."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return _recursion(series, impulse)


def _recursion(coefficients: Series | list[float], series: Series) -> Series:
    from scipy.signal import lfilter  # late: it takes as long to import as dpshard

    with np.errstate(over="ignore", invalid="ignore"):
        return cast(Series, lfilter([1.0], coefficients, series))


def _root_weights(n: int) -> Series:
    """Return the first `n` coefficients of the square root of 1 - x."""
    k = np.arange(1, n)
    return np.concatenate([[1.0], np.cumprod((k - 1.5) / k)])


def never_rising(series: Series) -> Series:
    """Return the largest |c_m| with m >= n, for every n."""
    return cast(Series, np.maximum.accumulate(np.abs(series[::-1]))[::-1])


def sum_of_columns(column: Series, separation: int) -> Series:
    """Return the sum [T] of every `separation`-th column of the Toeplitz matrix of `column`."""
    total = np.zeros(len(column))
    for first in range(0, len(column), separation):
        total[first:] += column[: len(column) - first]
    return total


@lru_cache(maxsize=16)
def optimised(bands: int, steps: int, separation: int, workload: Workload, *, inverted: bool) -> Series:
    """Return the coefficients [bands] of W if `inverted`, else of C.

    A sample takes part at most once in any `separation` steps.
    """
    weight = np.arange(steps, 0, -1.0)
    overlapping = separation < (steps if inverted else min(bands, steps))

    def log_error(tail: Series) -> tuple[float, Series]:
        known = np.zeros(steps)
        known[:bands] = [1.0, *tail]
        other = inverse(known[:bands], steps)
        strategy, noising = (other, known) if inverted else (known, other)
        with np.errstate(over="ignore", invalid="ignore"):
            column = never_rising(strategy) if overlapping else strategy
            move, model = sum_of_columns(column, separation), workload.sums(noising)
            squared, error = float(move @ move), float(np.sum(weight * model**2))
        if not math.isfinite(squared * error):
            return math.inf, np.zeros_like(tail)
        by_column = 2 * _moved_back(move, separation) / squared
        by_strategy = by_column if column is strategy else _through_envelope(strategy, by_column)
        by_noising = workload.sums((2 * weight * model)[::-1])[::-1] / error
        direct, through = (by_noising, by_strategy) if inverted else (by_strategy, by_noising)
        gradient = direct[:bands] - _correlated(through, _product(other, other))[:bands]
        return math.log(squared) + math.log(error), gradient[1:]

    root = workload.root(bands)
    start = (root if inverted else inverse(root, bands))[1:]
    found = _descend(log_error, start) if bands > 1 else start
    return np.concatenate([[1.0], np.round(found, 6)])  # further digits depend on the processor and on scipy


def _descend(function: Callable[[Series], tuple[float, Series]], x: Series) -> Series:
    """Return a local minimum of a function with a gradient and with kinks, where L-BFGS must begin again."""
    from scipy.optimize import minimize

    best, scale = function(x)[0], 1.0
    while scale > 1e-5:
        origin, length = x, scale

        def scaled(step: Series, origin: Series = origin, length: float = length) -> tuple[float, Series]:
            value, gradient = function(origin + length * step)
            return value, length * gradient

        found = minimize(scaled, np.zeros_like(x), jac=True, method="L-BFGS-B")
        if found.fun < best - 1e-6:
            best, x = found.fun, origin + length * found.x
        else:
            scale /= 4
    return x


def _moved_back(move: Series, separation: int) -> Series:
    """Transpose of `sum_of_columns`."""
    total = np.zeros(len(move))
    for first in range(0, len(move), separation):
        total[: len(move) - first] += move[first:]
    return total


def _through_envelope(series: Series, gradient: Series) -> Series:
    """Transpose of the derivative of `never_rising` at `series`."""
    reached = np.abs(series[::-1])
    record = np.concatenate([[True], reached[1:] > np.maximum.accumulate(reached)[:-1]])
    at = len(series) - 1 - np.maximum.accumulate(np.where(record, np.arange(len(series)), 0))[::-1]
    return cast(Series, np.bincount(at, gradient, len(series)) * np.sign(series))


def _product(a: Series, b: Series) -> Series:
    from scipy.signal import fftconvolve

    return cast(Series, fftconvolve(a, b)[: len(a)])


def _correlated(a: Series, b: Series) -> Series:
    """Transpose of the product with `b`, at `a`."""
    return cast(Series, _product(a[::-1], b)[::-1])
