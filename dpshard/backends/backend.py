"""A back-end: adapts the engine to one way of distributing a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpshard.backends.communicator import Communicator
from dpshard.backends.expert_parts import ExpertRanks
from dpshard.backends.grid import Grid
from dpshard.backends.roles import GradientStore, Reduction
from dpshard.backends.sharding import Sharding
from dpshard.backends.stages import Stages
from dpshard.clipping.groups import ClippingGroup, partition
from dpshard.errors import ConfigurationError, DpshardError, LogicalBatchError
from dpshard.noise.digest import LANES
from dpshard.noise.keyed import SumShard


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """The four roles of one model: communicator, sharding, reduction and gradient store."""

    layout: str
    communicator: Communicator
    sharding: Sharding
    reduction: Reduction
    gradients: GradientStore
    data: Communicator | None = None
    """Ranks that share the data, if not all."""
    grid: Grid | ExpertRanks | None = None
    """None if every rank holds the whole model."""

    @property
    def data_ranks(self) -> Communicator:
        """Ranks that share the data."""
        return self.data or self.communicator

    @property
    def counting_ranks(self) -> Communicator:
        """Ranks whose figures add up. Each stage has figures of its own."""
        return self.data_ranks if self.stages is None else self.communicator

    @property
    def counts(self) -> bool:
        """True if this rank counts its samples. All stages have the same, so only the first counts them."""
        return self.stages is None or self.stages.rank == 0

    @property
    def stages(self) -> Stages | None:
        """The stages of the pipeline, if any."""
        return self.sharding.parts if isinstance(self.sharding.parts, Stages) else None

    def partition(self, style: str | Sequence[Sequence[str]], max_grad_norm: float) -> tuple[ClippingGroup, ...]:
        """Clipping groups of the whole model."""
        form = partition if self.stages is None else self.stages.partition
        return form(self.sharding.core, style, list(self.sharding.parameters), max_grad_norm)

    def own_groups(self, groups: Sequence[ClippingGroup]) -> tuple[tuple[ClippingGroup, ...], frozenset[int]]:
        """Return this rank's groups, and those that span stages."""
        if self.stages is None:
            return tuple(groups), frozenset()
        held = self.sharding.parameters
        own = tuple(replace(group, names=tuple(n for n in group.names if n in held)) for group in groups)
        return own, self.stages.spanning(groups)

    def require_agreement(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigurationError unless all ranks have the same facts, which decide batches and noise."""
        own: dict[str, Any] = {"parameters": self.sharding.everywhere, "wrappers": self.layout}
        if self.sharding.parts is not None:
            own["parts of the model"] = self.sharding.parts.facts
        if wrong := self.communicator.mismatches({**facts, **own}):
            raise ConfigurationError(
                f"Ranks disagree about {', '.join(wrong)}. Make the same engine for the same model, in the same "
                f"wrappers, on every rank (no part under tensor or expert parallelism). sample_size counts the whole "
                f"data set; engine.batches(...) gives every rank its share."
            )

    def complete_sums(
        self, broken: bool, doubts_F: Tensor, digest: Callable[[Sequence[SumShard]], Tensor]
    ) -> tuple[list[int], list[int]]:
        """Complete the sums over ranks, once per logical batch, before the noise.

        `broken`: the logical batch is broken on this rank. `doubts_F`: its further objections, int64, 0 for none.
        `digest` returns its shards' contribution to the digest, int64 [L]. Returns `broken` and the largest doubts of
        all ranks; and the digest, or [] with objections. Raise LogicalBatchError, on all ranks, if a sum or a parameter
        changed after backward. Also raise it if ranks gathered different parameters.
        """
        all_gather, parts = self.communicator.all_gather, self.sharding.parts
        inputs = None if parts is None else parts.take_inputs()
        fault = None if broken else self.reduction.fault() or self.sharding.writes.fault()
        flags = doubts_F.new_zeros(4)  # a fault; a broken batch; first rank of those that gather; digest of gathers
        if fault is not None or broken:
            flags[int(broken)] = 1
        for place, x in enumerate(self.sharding.gathers, 2):
            if x:
                flags[place] = x
        own_X = torch.cat([flags, doubts_F])
        if self.reduction.is_unsummed:  # all ranks enter the following collectives, or none
            found = self._verdict(all_gather(own_X).cpu(), fault)
            if any(found):
                return found, []
            self.reduction.sum_rest()
        lanes = LANES if self.grid is None else 2 * LANES + 1
        with torch.no_grad():
            silent = broken or fault is not None
            part_L = own_X.new_zeros(lanes) if silent else self._part(digest, inputs).to(own_X.device)
        ranks_WX = all_gather(torch.cat([own_X, part_L])).cpu()  # waits for an accelerator, as `writes` rarely does
        found = self._verdict(ranks_WX[:, :-lanes], fault)
        return found, [] if any(found) else self._digest(ranks_WX[:, -lanes:])

    def _part(self, digest: Callable[[Sequence[SumShard]], Tensor], inputs: Tensor | None) -> Tensor:
        shards, parts = self.gradients.shards(), self.sharding.parts
        if parts is None or inputs is None:
            return digest(shards)
        return torch.cat([x.to(inputs.device) for x in (*map(digest, parts.divide(shards)), inputs)])

    def _verdict(self, ranks_WX: Tensor, fault: DpshardError | None) -> list[int]:
        rows = ranks_WX.tolist()
        apart = _are_apart([row[2:4] for row in rows])
        if apart:
            self.sharding.gather_anew()
        if fault is not None:
            raise fault
        faulty = [row[0] for row in rows]
        if any(faulty):
            self.gradients.forget()
            raise LogicalBatchError(
                f"Rank {faulty.index(1)} refused the clipped sums of this logical batch; its error says why. Call "
                f"zero_grad() on all ranks to start afresh."
            )
        _, broken, _, _, *doubts = map(max, zip(*rows, strict=True))
        if apart and not broken:
            self.gradients.forget()
            raise LogicalBatchError(_APART)
        return [broken, *doubts]

    def _digest(self, ranks_WL: Tensor) -> list[int]:
        try:
            ranks_DL = ranks_WL if self.grid is None else self.grid.whole(ranks_WL)
            return self.reduction.whole_digest(ranks_DL).tolist()
        except LogicalBatchError:
            self.gradients.forget()
            raise

    def detach(self) -> None:
        """Remove all hooks."""
        self.reduction.detach()
        self.sharding.detach()


_APART = (
    "Ranks gathered different FSDP units, or the same ones in another order, so they may have computed with weights of "
    "other modules. A branch depends on a rank's samples, or an optional input came to some ranks only. Let all ranks "
    "run the same units in the same order, in backward too; pad samples, or choose within a unit: call fully_shard on "
    "the module that holds the branches, not on each. Or train under DDP. Call zero_grad() to start afresh."
)


def _are_apart(gathers_W: Sequence[Sequence[int]]) -> bool:
    """Return True if two ranks that gather together differ; see [Note: One order of gathers]."""
    first: dict[int, int] = {}
    return any(first.setdefault(together, digest) != digest for together, digest in gathers_W)
