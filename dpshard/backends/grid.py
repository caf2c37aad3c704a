"""All ranks, as data ranks times model ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.backends.communicator import Communicator
from dpshard.backends.model_parts import ModelParts
from dpshard.errors import ConfigurationError, LogicalBatchError


class Grid:
    """All ranks as a grid; raises ConfigurationError if they form none."""

    def __init__(self, data: Communicator, parts: ModelParts, everyone: Communicator) -> None:
        self._parts = parts
        self._sizes, self._order = places_of(data, parts, everyone)

    def whole(self, ranks_WL: Tensor) -> Tensor:
        """Digests [data ranks, L], from those of parts, whole sums and inputs [all ranks, 2 L + 1].

        Raises LogicalBatchError if the model ranks' inputs or whole sums differ.
        """
        ranks = ranks_WL[self._order].unflatten(0, self._sizes)  # [data, ..., model, 2 L + 1]
        parts, same, inputs = *ranks[..., :-1].chunk(2, -1), ranks[..., -1]
        if _differ(inputs):
            raise LogicalBatchError(f"{self._parts.unlike} Call zero_grad() to start afresh.")
        total = parts.sum(-2) + _first(same)
        for axis in reversed(self._parts.axes[:-1]):
            total = total.sum(-2) if axis.spread else _first(total)
        return total


def _differ(x: Tensor) -> bool:
    return bool((x != x[..., :1]).any())


def _first(digests: Tensor) -> Tensor:
    """Return the digests [..., L] on which all ranks [..., ranks, L] must agree."""
    if _differ(digests.transpose(-1, -2)):
        raise LogicalBatchError(
            "The clipped sums of parameters that every rank of one model holds whole differ between these ranks. "
            "So the norms of samples do not fit the sums to release. Give all ranks the same samples, "
            "the same random numbers (torch.manual_seed before dropout), and whole gradients. In tensor "
            "parallelism by hand, reduce the gradients of what enters column-wise maps. Name parameters that "
            "see a part of the sequence 'sum'. Call zero_grad() to start afresh."
        )
    return digests[..., 0, :]


def sizes_of(data: Communicator, parts: ModelParts) -> tuple[int, ...]:
    """Sizes of a grid, outermost first."""
    return data.world_size, *(axis.size for axis in parts.axes)


def places_of(data: Communicator, parts: ModelParts, everyone: Communicator) -> tuple[tuple[int, ...], list[int]]:
    """Return the sizes of the grid, and all ranks in its order."""
    sizes = sizes_of(data, parts)
    if math.prod(sizes) != everyone.world_size:
        raise ConfigurationError(
            f"{data.world_size} ranks share the data, and {' x '.join(map(str, sizes[1:]))} the model, but there are "
            f"{everyone.world_size} ranks: the role of the others is unknown. Make the groups such that every rank "
            f"has one place in each (init_device_mesh with a dimension for each)."
        )
    of_data = dist.get_process_group_ranks(data.group) if data.group is not None else [dist.get_rank()]
    groups = [of_data, *(dist.get_process_group_ranks(axis.group) for axis in parts.axes)]
    own, n = [data.rank, *(axis.rank for axis in parts.axes)], len(groups)
    places = everyone.all_gather(torch.tensor([*own, *map(min, groups)], device="cpu")).cpu().tolist()
    straight = len({tuple(place[:n]) for place in places}) == len(places) and all(
        len({place[other] for place in places if place[n + axis] == group}) == 1
        for axis in range(n)
        for group in {place[n + axis] for place in places}
        for other in range(n)
        if other != axis
    )
    if not straight:
        raise ConfigurationError(
            "The groups of ranks that share the data, and of those that share the model, do not cross in one rank "
            "each. Ranks of one model would get different samples. Take both from one init_device_mesh."
        )
    return sizes, sorted(range(len(places)), key=lambda rank: places[rank][:n])
