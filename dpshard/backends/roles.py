"""The roles that reduce and keep clipped sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from dpshard.clipping.tape import Take
from dpshard.errors import DpshardError
from dpshard.noise.keyed import SumShard


class Reduction(ABC):
    """Sums clipped sums over ranks, by default all of them during backward."""

    @abstractmethod
    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Take the clipped sums of an anchor's parameters; return their gradients for autograd.

        Ranks are summed, never averaged, in float32 or wider.
        """

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context around one micro-batch."""
        return nullcontext()

    @abstractmethod
    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True if ranks wait for each other in this micro-batch, even if it is padding."""

    @abstractmethod
    def fault(self) -> DpshardError | None:
        """Return the error for which this rank's sums must not be released, or None."""

    @property
    def is_unsummed(self) -> bool:
        """True if `sum_rest` has sums to reduce."""
        return False

    def sum_rest(self) -> None:  # noqa: B027
        """Reduce the sums that backward did not."""

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Digest [L] of the sums from the ranks' contributions; raise LogicalBatchError if replicas differ."""
        return ranks_WL.sum(0)

    def detach(self) -> None:  # noqa: B027
        """Restore the framework."""


class GradientStore(Protocol):
    """Keeps this rank's clipped sums, and makes private gradients of them."""

    def shards(self) -> list[SumShard]:
        """Return this rank's sums for the noise."""
        ...

    def privatize(self, release_: Callable[[Sequence[SumShard]], Tensor]) -> Tensor:
        """Turn every clipped sum, also zeros, into a private gradient; return the sums' L2 norm [] before noise.

        `release_` privatizes this rank's shards in place, and returns their L2 norm before, float64 [].
        """
        ...

    def install(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer of `held` reads them."""
        ...

    def full_gradient(self, name: str) -> Tensor | None:
        """Whole private gradient, if the parameter has one; all ranks call it, in one order."""
        ...

    def refuse_stale(self) -> None:
        """Raise LogicalBatchError if an earlier step's gradient remains."""
        ...

    def drop(self) -> None:
        """Drop clipped sums without noise."""
        ...

    def forget(self) -> None:
        """Forget records and sums outside `.grad`."""
        ...
