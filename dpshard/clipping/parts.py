"""What the tape asks of ranks that hold parts of one model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Parts(Protocol):
    """The ranks that hold the parts of one model; all of them see the same samples, in one order.

    [Note: Norms of parts]
    Per-sample gradients are of three kinds. A rank has a *part* of one: squares add up over the ranks. Every rank has
    the same *whole*: the first rank counts it. Every rank has a *term* of a sum (over parts of a sequence): terms add
    up before they are squared. Each rank then has a slice of the sum, if the user tells the terms, or all of it, under
    SequenceParallel. A sample's factor is computed from a norm that is bitwise equal on all ranks, so what the ranks
    release is one vector, of at most the threshold's length.
    """

    def is_cut(self, name: str) -> bool:
        """Return True if the ranks hold parts of this parameter, False if each holds all of it."""
        ...

    def is_termwise(self, name: str) -> bool:
        """Return True if every record of this parameter is a term of a sum over the ranks."""
        ...

    def adds_squares(self, name: str) -> bool:
        """Return True if squares of what the ranks have of a gradient add up: of parts, and of slices."""
        ...

    def norm_sq(self, cut_B: Tensor, whole_B: Tensor) -> Tensor:
        """Squared norms [B] from those of this rank's parts and of whole gradients, bitwise equal on all ranks."""
        ...

    def sliced(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, n] of the sums of all ranks' terms [B, *shape], for a parameter of terms."""
        ...

    def whole_sum(self, name: str, total: Tensor | None, parameter: Tensor) -> Tensor | None:
        """Return the whole of a sum of which each rank has a slice, or the sum itself; all ranks call it."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' terms, bitwise equal on all of them."""
        ...
