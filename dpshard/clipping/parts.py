"""Operations that the tape needs if several ranks hold parts of one model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Parts(Protocol):
    """The ranks that hold the parts of one model. All see the same samples, in one order, unless `of_samples`.

    [Note: Norms of parts] Each rank may hold a *part* of a per-sample gradient: squares add up over the ranks. All may
    hold the same *whole*: only the first rank counts it. Or each holds a *term* of a sum over parts of a sequence:
    terms add up before they are squared. A sample's clip coefficient comes from a norm that is bitwise equal on all
    ranks. So the ranks together release one vector, whose norm is at most the threshold.
    """

    size: int
    rank: int

    @property
    def of_samples(self) -> bool:
        """True if each rank has B samples of its own, and parts on all ranks take rows of them.

        Then the records of a part are of the W * B samples of all ranks. Otherwise the next three methods return their
        argument.
        """
        ...

    def pad_to_all(self, x_B: Tensor) -> Tensor:
        """Return [W * B] numbers: `x_B` for the rank's own samples, else 0."""
        ...

    def select_own(self, x_B: Tensor) -> Tensor:
        """Numbers [B] of the rank's own samples."""
        ...

    def gather_samples(self, x_B: Tensor) -> Tensor:
        """Numbers [W * B] of all ranks' samples."""
        ...

    def meet(self, group: int) -> None:
        """Raise LogicalBatchError if other ranks clip another group now (experts without rows, branches)."""
        ...

    def is_cut(self, name: str) -> bool:
        """Return True if ranks hold parts of the parameter."""
        ...

    def is_termwise(self, name: str) -> bool:
        """Return True if the parameter's records are terms of a sum."""
        ...

    def adds_squares(self, name: str) -> bool:
        """Return True if the parameter's squares add up over ranks."""
        ...

    def norm_sq(self, cut_B: Tensor, whole_B: Tensor) -> Tensor:
        """Squared norms [B], bitwise equal on all ranks, from this rank's parts and wholes."""
        ...

    def norm_sq_of_sums(self, cut_X: Tensor, whole_X: Tensor) -> Tensor:
        """Squared norms [X] of sums over terms, bitwise equal on all ranks."""
        ...

    def sliced(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, n] of the sums of terms [B, *shape]."""
        ...

    def whole_sum(self, name: str, total: Tensor | None, parameter: Tensor) -> Tensor | None:
        """Return a whole sum, perhaps from slices; all ranks call it."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """Sum of terms, bitwise equal on all ranks."""
        ...

    @property
    def terms(self) -> Parts:
        """The ranks that each hold a term of a sum."""
        ...
