"""The roles that reduce and keep clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from dpshard.clipping.tape import Take
from dpshard.errors import DpshardError
from dpshard.noise.keyed import SumShard


class Reduction(Protocol):
    """Sums clipped sums over ranks, between the anchors and the GradientStore."""

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Take the clipped sums of an anchor's parameters; return their gradients for autograd.

        Ranks are summed, never averaged, in float32 or wider.
        """
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Block around one micro-batch."""
        ...

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True if ranks wait for each other, even in a micro-batch of padding."""
        ...

    def fault(self) -> DpshardError | None:
        """Return why this rank's sums must not be released, or None."""
        ...

    @property
    def is_unsummed(self) -> bool:
        """True if `sum_rest` has sums to reduce over ranks."""
        ...

    def sum_rest(self) -> None:
        """Reduce the sums that backward did not reduce."""
        ...

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Digest [L] of the sums from the ranks' contributions; LogicalBatchError if replicas differ."""
        ...

    def detach(self) -> None:
        """Restore the framework."""
        ...


class GradientStore(Protocol):
    """Keeps this rank's clipped sums, and turns them into private gradients."""

    def shards(self) -> list[SumShard]:
        """Return this rank's sums as input of the noise."""
        ...

    def privatize(self, release_: Callable[[Sequence[SumShard]], Tensor]) -> Tensor:
        """Turn every clipped sum, zeros without a gradient, into a private gradient; return their L2 norm [].

        `release_` privatizes this rank's shards in place, and returns the L2 norm that they had, float64 [].
        """
        ...

    def install(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer of `held` reads them."""
        ...

    def full_gradient(self, name: str) -> Tensor | None:
        """Whole private gradient before the optimizer's step, if it will find one.

        All ranks call it, for the same names in one order.
        """
        ...

    def refuse_stale(self) -> None:
        """Raise LogicalBatchError if a gradient of an earlier step remains."""
        ...

    def drop(self) -> None:
        """Drop clipped sums that were not privatized, and their gradients."""
        ...

    def forget(self) -> None:
        """Forget records and sums outside `.grad`: zero_grad() lets the script start afresh."""
        ...
