"""Gives F.linear back to torch, which ZeRO-3 replaces for the whole process."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # what F.linear is before it is replaced


def keep_linear() -> None:
    """Undo that ZeRO-3 has replaced F.linear, and keep it from doing so again.

    Its autograd function does not keep unsharded weights, and hides parameters from rules, in this model and any
    other. `stage3.py` has an answer of its own to what autograd keeps.
    """
    partitioning = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partitioning is None:
        return
    partitioning.zero3_linear_wrap = _LINEAR  # type: ignore[attr-defined]  # what it would replace F.linear by
    if getattr(F.linear, "__name__", "") == "zero3_linear_wrap":
        F.linear = _LINEAR
