"""The uses of one compiled region: all its slots come from one node, and their gradients arrive together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from dpshard.clipping.group_tape import Use

Asked = Sequence[tuple[Use, tuple[Tensor, ...]]]
"""Uses of a region in order, each with its templates."""


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Facts of the uses of a region that no call changes."""

    uses: tuple[Use, ...]
    names: tuple[tuple[str, ...], ...]
    """Root parameters by use."""
    places: tuple[slice, ...]
    """Places of each use's gradients among those of the region."""
    anchors: list[int]
    """Anchors of all uses, sorted."""

    def fits(self, asked: Asked) -> bool:
        """Return True if the plan was made for these uses."""
        return len(asked) == len(self.uses) and all(use is own for (use, _), own in zip(asked, self.uses, strict=True))


def plan_region(asked: Asked, anchor_of: dict[str, int]) -> RegionPlan:
    """Return the plan of these uses; `anchor_of`: the anchor of each parameter."""
    names = tuple(tuple(name for source in use.sources for name in source.roots) for use, _ in asked)
    ends = accumulate((len(templates) for _, templates in asked), initial=0)
    places = tuple(slice(start, end) for start, end in pairwise(ends))
    anchors = sorted({anchor_of[name] for some in names for name in some})
    return RegionPlan(tuple(use for use, _ in asked), names, places, anchors)
