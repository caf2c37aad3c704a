"""The roles that compose a back-end, besides `Communicator` and `Sharding`: reducing sums, and keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from dpshard.clipping.tape import Take
from dpshard.errors import DpshardError
from dpshard.noise.keyed import Shard


class Reduction(Protocol):
    """Sums clipped sums over ranks, on their way from the anchors to the GradientStore."""

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Take the clipped sums of an anchor's parameters; return the gradients that the anchor returns for them.

        What is summed over ranks is summed, never averaged, in float32 or wider.
        """
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Work on one micro-batch of a logical batch in a block."""
        ...

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return True if ranks wait for each other in a micro-batch, also in one of padding only."""
        ...

    def fault(self) -> DpshardError | None:
        """Return the reason why the sums of this rank must not be released, if there is one."""
        ...

    @property
    def is_unsummed(self) -> bool:
        """Whether `sum_rest` has sums to reduce over ranks."""
        ...

    def sum_rest(self) -> None:
        """Reduce the sums that were not reduced in backward."""
        ...

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Return the digest [L] of the sums, of what each rank contributes; LogicalBatchError if replicas differ."""
        ...

    def detach(self) -> None:
        """Give the framework back as it was."""
        ...


class GradientStore(Protocol):
    """Keeps the clipped sums that this rank holds, and has noise added to them."""

    def shards(self) -> list[Shard]:
        """Return the sums of this rank as the noise sees them."""
        ...

    def privatize(self, release_: Callable[[Sequence[Shard]], Tensor]) -> Tensor:
        """Turn every clipped sum into a private gradient; a parameter without a gradient gets its noise too.

        `release_` takes the shards of this rank, does so in place, and returns the L2 norm that they had, float64.
        Returns the L2 norm of the clipped sum, [].
        """
        ...

    def install(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer that is about to step on `held` looks for them."""
        ...

    def full_gradient(self, name: str) -> Tensor | None:
        """Return the whole private gradient of a parameter, between `privatize` and the optimizer's step.

        All ranks call it, for the same names in the same order. None if the optimizer will find no gradient.
        """
        ...

    def refuse_stale(self) -> None:
        """Raise LogicalBatchError if a gradient of an earlier step is still there."""
        ...

    def drop(self) -> None:
        """Forget clipped sums that were not privatized, and their gradients."""
        ...

    def forget(self) -> None:
        """Forget what was noted and kept beside gradients: what is left is lost, and zero_grad() begins anew."""
        ...
