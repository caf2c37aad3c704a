"""Requests of the tape to ranks that hold parts of one model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Parts(Protocol):
    """The ranks that hold the parts of one model. All of them see the same samples, in one order, unless `of_samples`.

    [Note: Norms of parts] Per-sample gradients are of three kinds. A rank has a *part* of one: squares add up over the
    ranks. Every rank has the same *whole*: the first rank counts it. Every rank has a *term* of a sum (over parts of a
    sequence): terms add up before they are squared. Each rank then has a slice of the sum, if the user declares terms,
    or all of it, under SequenceParallel. A sample's factor comes from a norm that is bitwise equal on all ranks. So the
    ranks release one vector, of at most the threshold's length.
    """

    size: int
    rank: int
    """Number of the ranks, and this one among them."""

    @property
    def of_samples(self) -> bool:
        """True if each rank has B samples of its own, whose rows meet the parts of parameters on all ranks.

        Records of a part are of the W * B samples of all ranks, those of other parameters of the rank's own.
        """
        ...

    def pad_to_all(self, x_B: Tensor) -> Tensor:
        """Return numbers [W * B] of all ranks' samples: `x_B` for the rank's own, else 0.

        This and the next two return their argument if not `of_samples`.
        """
        ...

    def select_own(self, x_B: Tensor) -> Tensor:
        """Return the numbers [B] of the rank's own samples, from those of all."""
        ...

    def gather_samples(self, x_B: Tensor) -> Tensor:
        """Return the numbers [W * B] of all ranks' samples, from each rank's own."""
        ...

    def meet(self, group: int) -> None:
        """Raise LogicalBatchError if other ranks clip another group now; called before the norms of a group.

        Ranks may differ in what runs if they send each other rows: an expert without rows, a branch.
        """
        ...

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

    def norm_sq_of_sums(self, cut_X: Tensor, whole_X: Tensor) -> Tensor:
        """Squared norms [X] from those of this rank's parts, and of what it holds whole, of sums over all terms."""
        ...

    def sliced(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, n] of the sums of all ranks' terms [B, *shape], for a parameter of terms."""
        ...

    def whole_sum(self, name: str, total: Tensor | None, parameter: Tensor) -> Tensor | None:
        """Return a whole sum, from the slices of all ranks or as it is; all ranks call it."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' terms under SequenceParallel, bitwise equal on all of them."""
        ...

    @property
    def terms(self) -> Parts:
        """The ranks with a term each, for parameters of terms: these, or others (crossed_parts.py)."""
        ...
