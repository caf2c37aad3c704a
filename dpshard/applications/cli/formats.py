"""Formats of figures, for users and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_BLANK = "one data set has a blank instead, which contributes nothing"

NEIGHBOURS = {
    "add-or-remove-one": f"two data sets of N samples that differ in one sample: {_BLANK}",
    "replace-special": f"two data sets of N samples that differ in one sample: {_BLANK}; another sample may take the "
    "blank's place in a capped batch",
    "zero-out": f"two data sets of N samples in the same order that differ in one sample: {_BLANK}",
}
"""Neighbouring relations of dpshard.accounting, in words."""


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as strict JSON, with null for NaN and infinity."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
