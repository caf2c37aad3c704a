"""Which Triton kernels pass their self-test on a device, because a warning of a worker is not seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dpshard.kernels.triton import dispatch

PASSED = "passed"


def outcomes(device: torch.device) -> dict[str, str]:
    """Return by group of kernels that it passed, or why it is not used."""
    return {group: _outcome(is_used) for group, is_used in dispatch.self_tests(device).items()}


def _outcome(is_used: Callable[[], bool]) -> str:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if is_used():
            return PASSED
    return " ".join(str(warning.message) for warning in said) or "not used"


def line(results: Sequence[Mapping[str, Any]]) -> str:
    """Return one line about `results` of kind "kernels", which holds at most one result."""
    if not results:
        return "The self-tests of the Triton kernels have no result."
    found = results[0]["outcomes"]
    failed = [f"{group} ({' '.join(why.split())})" for group, why in found.items() if why != PASSED]
    passed = [group for group, why in found.items() if why == PASSED]
    return f"Triton kernels that passed their self-test: {_listed(passed)}. Others: {_listed(failed)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
