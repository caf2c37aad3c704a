"""A loss that the script gives, outside the model.

Verification compares it once, on the labels of one micro-batch. A mean that divides by class weights agrees there if
all labels weigh the same. So each new label is compared when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import VerificationError

_TOLERANCE = 1e-3


class GivenLoss:
    """Requires `loss_fn(outputs, labels)` to be the mean of the losses of single rows.

    It compares micro-batches with a new integer label, and those of steps 0, 1, 2, 4, 8, ...
    """

    def __init__(self, loss_fn: Callable[[Any, Tensor], Tensor]) -> None:
        self._loss_fn = loss_fn
        self._known: set[int] = set()

    def require_mean(self, outputs: Any, labels: Tensor, step: int) -> None:
        """Raise VerificationError unless each row has a loss of its own."""
        new: set[int] = set()
        if not labels.is_floating_point():
            # Of many labels a row, the ends: an ignored one is mostly -100, -1 or 255.
            told = labels if labels.dim() == 1 else torch.stack(labels.aminmax())
            new = set(told.tolist()) - self._known
        if len(labels) > 1 and (new or step & (step - 1) == 0) and self._compare(outputs, labels):
            self._known |= new

    @torch.no_grad()
    def _compare(self, outputs: Any, labels: Tensor) -> bool:
        together, again = (self._loss_fn(outputs, labels).mean() for _ in range(2))
        if not together.isfinite() or not torch.equal(together, again):  # it draws random numbers
            return False
        rows = len(labels)
        alone_B = torch.stack([self._loss_fn(_row(outputs, i, rows), labels[i : i + 1]).mean() for i in range(rows)])
        tolerance = max(_TOLERANCE, 4 * torch.finfo(together.dtype).eps)
        if not (together - alone_B.mean()).abs() <= tolerance * alone_B.abs().mean():
            raise VerificationError(
                f"compute_loss_func gives {float(together):g} for {rows} rows; the mean of the rows alone is "
                f"{float(alone_B.mean()):g}. So one sample changes the loss of the others, before clipping. A mean "
                f"with class weights or ignored labels does that: use reduction='none' and then .mean()."
            )
        return True


def _row(outputs: Any, i: int, rows: int) -> Any:
    def pick(x: Any) -> Any:
        return x[i : i + 1] if isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows else x

    return pytree.tree_map(pick, outputs)
