"""Restores torch's F.linear, which ZeRO-3 replaces in the whole process."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # the original F.linear


def keep_linear() -> None:
    """Keep F.linear torch's: ZeRO-3's hides parameters from rules."""
    partitioning = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partitioning is None:
        return
    partitioning.zero3_linear_wrap = _LINEAR  # type: ignore[attr-defined]  # ZeRO-3 assigns it to F.linear
    if getattr(F.linear, "__name__", "") == "zero3_linear_wrap":
        F.linear = _LINEAR
