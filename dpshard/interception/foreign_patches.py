"""What other libraries replace in torch for the whole process, and that would hide parameters from the mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # what F.linear is before anybody replaces it


def undo_foreign_patches() -> None:
    """Give F.linear back to torch.

    ZeRO-3 replaces it, for good, by an autograd function that does not keep gathered weights. Of that the mode sees
    nothing, in this model or any other; and zero3.py has an answer of its own to what autograd keeps.
    """
    if getattr(F.linear, "__name__", "") == "zero3_linear_wrap":
        F.linear = _LINEAR
