"""Kinds of inputs and attributes: numbers of about one size are alike, so that a ramp has few kinds."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from dpshard.interception.run import Run

_EXACT = 4


def kind_of_value(x: Any) -> Any:
    """What tells a value from others: flags and strings by themselves, numbers by sign and power of two."""
    if isinstance(x, (bool, str)) or x is None:
        return x
    if isinstance(x, int):
        return x if abs(x) <= _EXACT else ("int", x > 0, x.bit_length())
    if isinstance(x, float):
        return ("float", x > 0, math.frexp(x)[1] if x and math.isfinite(x) else repr(x))
    return None


def kind_of_run(run: Run) -> Any:
    """What tells a call of a module from others: its structure, ranks, dtypes, and what is no tensor."""
    inputs = [
        (x.dim(), x.dtype, d) if isinstance(x, Tensor) else kind_of_value(x)
        for x, d in zip(run.leaves, run.dims, strict=True)
    ]
    # What mixes samples shows with two of them at least.
    return (run.module, run.tree, tuple(inputs), run.rows > 1)
