"""A back-end: who talks to the ranks, who holds parameters, how sums cross ranks, and where gradients are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpshard.backends.communicator import Communicator
from dpshard.backends.roles import GradientStore, Reduction
from dpshard.backends.sharding import Sharding
from dpshard.errors import DpshardError, LogicalBatchError
from dpshard.noise.digest import LANES
from dpshard.noise.keyed import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """The four roles for one model. A back-end brings its own object for each role in which it differs."""

    layout: str
    """How ranks share the model, in words."""
    communicator: Communicator
    sharding: Sharding
    reduction: Reduction
    gradients: GradientStore

    def complete_sums(
        self, broken: bool, doubts_F: Tensor, digest: Callable[[Sequence[Shard]], Tensor]
    ) -> tuple[list[int], list[int]]:
        """Sum what is still to be summed over ranks; called once per logical batch, before its noise.

        Args:
            broken: Whether the logical batch is broken on this rank.
            doubts_F: What else speaks against the release on this rank, int64, 0 for nothing.
            digest: Takes the shards of this rank; returns their contribution to the digest of the sums, int64 [L].

        Returns `broken` and the largest doubts of all ranks; and the digest, if nothing speaks against the release.
        LogicalBatchError, on all ranks, if a sum was changed since backward.
        """
        all_gather = self.communicator.all_gather
        fault = None if broken else self.reduction.fault()
        own_X = torch.cat([doubts_F.new_tensor([fault is not None, broken]), doubts_F])
        if self.reduction.is_unsummed:  # all ranks enter the collectives that follow, or none
            found = self._verdict(all_gather(own_X).cpu(), fault)
            if any(found):
                return found, []
            self.reduction.sum_rest()
        with torch.no_grad():
            silent = broken or fault is not None
            part_L = own_X.new_zeros(LANES) if silent else digest(self.gradients.shards())
        ranks_WX = all_gather(torch.cat([own_X, part_L.to(own_X.device)])).cpu()  # an accelerator is waited for once
        found = self._verdict(ranks_WX[:, :-LANES], fault)
        return found, [] if any(found) else self._digest(ranks_WX[:, -LANES:])

    def _verdict(self, ranks_WX: Tensor, fault: DpshardError | None) -> list[int]:
        """Return the largest of every column behind the first, which says who has a fault; raise if a rank has one."""
        if fault is not None:
            raise fault
        faulty = ranks_WX[:, 0].tolist()
        if any(faulty):
            self.gradients.forget()
            raise LogicalBatchError(
                f"Rank {faulty.index(1)} has refused the clipped sums of this logical batch, and its error says why. "
                f"zero_grad() then makes a fresh start on all ranks."
            )
        return ranks_WX[:, 1:].amax(0).tolist()

    def _digest(self, ranks_WL: Tensor) -> list[int]:
        try:
            return self.reduction.whole_digest(ranks_WL).tolist()
        except LogicalBatchError:
            self.gradients.forget()
            raise

    def detach(self) -> None:
        """Remove every trace from the model, its parameters, and the framework that shards them."""
        self.reduction.detach()
        self.sharding.detach()
