"""Clipping functions: from norms to clip coefficients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpshard.config import require_positive
from dpshard.errors import ConfigurationError
from dpshard.records.host import constant, elementwise


class ClippingFunction(Protocol):
    """Computes the clip coefficients of per-sample gradients."""

    def factor(self, norm_B: Tensor, threshold: float) -> Tensor:
        """Return factors [B] for norms [B] (float32 or float64).

        Guarantee: factor >= 0 and factor * norm <= threshold, as real numbers; 0 for a NaN or infinite norm.
        """
        ...


def _bounded(xp: Any, clip_coef_B: Any, norm_B: Any, threshold: float) -> Any:
    """Enforce the guarantee of ClippingFunction. `xp`: numpy or torch."""
    bounded_B = xp.minimum(clip_coef_B, _largest(xp, norm_B, threshold))
    return xp.fmax(bounded_B, constant(xp, 0, norm_B))  # 0 for NaN


def _largest(xp: Any, norm_B: Any, threshold: float) -> Any:
    """Largest factors for which factor * norm <= threshold is certain; >= 0, or NaN."""
    # Records measure no norm below `tiny`; it keeps 0 and -0.0 out.
    tiny = constant(xp, float(xp.finfo(norm_B.dtype).tiny), norm_B)
    return _quotient(xp, threshold, xp.maximum(norm_B, tiny))


def _quotient(xp: Any, threshold: float, divisor_B: Any) -> Any:
    """Lower bound of threshold / divisor, as real numbers, for divisors > 0; >= 0, or NaN."""
    quotient_B = constant(xp, _at_most(threshold, divisor_B.dtype), divisor_B) / divisor_B
    # Division rounds by at most half a step, so one step towards zero gives a lower bound. zeros_like: nextafter takes
    # no CPU scalar on another device.
    return xp.nextafter(quotient_B, xp.zeros_like(quotient_B))


@functools.lru_cache(maxsize=1024)  # adaptive thresholds change at every step
def _at_most(x: float, dtype: Any) -> float:
    """Largest number of `dtype` (float32, float64) not above `x` > 0."""
    if dtype.itemsize == 8:
        return x
    # numpy, not torch, because the cache must not hold a fake tensor.
    with np.errstate(over="ignore"):  # overflow gives the largest float32
        nearest = np.float32(x)
    return float(nearest if float(nearest) <= x else np.nextafter(nearest, np.float32(0)))


class _Elementwise:
    __slots__ = ()

    def factor(self, norm_B: Tensor, threshold: float) -> Tensor:
        """Return factors [B] for norms [B]."""
        return elementwise(self._factor, norm_B, threshold)

    def _factor(self, xp: Any, norm_B: Any, threshold: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class AutomaticClipping(_Elementwise):
    """C = R / (|g| + stability): no threshold to tune; Bu et al. 2022, arXiv:2206.07136."""

    stability: float = 0.01
    """Added to the norm; > 0."""

    def __post_init__(self) -> None:
        require_positive("stability", self.stability)

    def _factor(self, xp: Any, norm_B: Any, threshold: float) -> Any:
        # The rounded sum is at least the norm, so the guarantee holds. Devices may flush numbers below `tiny` to 0.
        stability = max(self.stability, float(xp.finfo(norm_B.dtype).tiny))
        return xp.fmax(_quotient(xp, threshold, norm_B + stability), constant(xp, 0, norm_B))


@dataclass(frozen=True, slots=True)
class AbadiClipping(_Elementwise):
    """C = min(1, R / |g|): projection onto the ball of radius R; Abadi et al. 2016, arXiv:1607.00133."""

    def _factor(self, xp: Any, norm_B: Any, threshold: float) -> Any:
        one, zero = constant(xp, 1, norm_B), constant(xp, 0, norm_B)
        return xp.fmax(xp.minimum(_largest(xp, norm_B, threshold), one), zero)


@dataclass(frozen=True, slots=True)
class GlobalClipping(_Elementwise):
    """C = R / Z if |g| <= Z, else 0: drops outliers; Bu et al. 2021, arXiv:2106.07830."""

    bound_over_threshold: float = 1.0
    """Z / R, >= 1."""

    def __post_init__(self) -> None:
        require_positive("bound_over_threshold", self.bound_over_threshold)

    def _factor(self, xp: Any, norm_B: Any, threshold: float) -> Any:
        inside_B = norm_B <= threshold * self.bound_over_threshold
        clip_coef_B = inside_B * constant(xp, 1 / self.bound_over_threshold, norm_B)
        return _bounded(xp, clip_coef_B, norm_B, threshold)


@dataclass(frozen=True, slots=True, repr=False)
class _Guarded:
    function: ClippingFunction

    def factor(self, norm_B: Tensor, threshold: float) -> Tensor:
        """Return factors [B] for norms [B]."""
        clip_coef_B = self.function.factor(norm_B, threshold).to(norm_B)
        return elementwise(_bounded, clip_coef_B, norm_B, threshold)

    def __repr__(self) -> str:
        return repr(self.function)


_FUNCTIONS: dict[str, ClippingFunction] = {
    "automatic": AutomaticClipping(),
    "abadi": AbadiClipping(),
    "global": GlobalClipping(),
}


def factors(function: ClippingFunction, norm_MB: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Factors [M, B] of M groups."""
    if isinstance(function, _Elementwise) and len(set(thresholds)) == 1:
        return function.factor(norm_MB, thresholds[0])
    rows = zip(norm_MB.unbind(), thresholds, strict=True)
    return torch.stack([function.factor(norm_B, threshold) for norm_B, threshold in rows])


def parse_clipping_fn(clipping_fn: str | ClippingFunction) -> ClippingFunction:
    """Return the clipping function of a name, or an object with a `factor` method, its guarantee enforced.

    Raise ConfigurationError for anything else. Checkpoints compare objects by repr, so their class must define it.
    """
    if isinstance(clipping_fn, str):
        if clipping_fn not in _FUNCTIONS:
            raise ConfigurationError(f"clipping_fn={clipping_fn!r} is unknown; choose one of {sorted(_FUNCTIONS)}.")
        return _FUNCTIONS[clipping_fn]
    if isinstance(clipping_fn, type) or not callable(getattr(clipping_fn, "factor", None)):
        raise ConfigurationError(
            f"clipping_fn={clipping_fn!r} has no method factor(norm_B, threshold). Choose one of {sorted(_FUNCTIONS)}, "
            f"or pass an instance of a class that has it."
        )
    if type(clipping_fn) in (AutomaticClipping, AbadiClipping, GlobalClipping):
        return clipping_fn
    if type(clipping_fn).__repr__ is object.__repr__:
        raise ConfigurationError(
            f"clipping_fn: {type(clipping_fn).__name__} defines no __repr__, so a resumed run could not recognise "
            f"it. Make it a frozen dataclass, or give it a __repr__ that shows its settings."
        )
    return _Guarded(clipping_fn)
