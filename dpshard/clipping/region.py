"""The uses of one compiled region.

[Note: Rows of uses] Uses that can be recorded together form a row, and share the dummies of their slot. The region cuts
the dummies along the samples, so its compiled code joins the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from dpshard.clipping.stacks import FEWEST, maker_to_join
from dpshard.clipping.uses import Use
from dpshard.rules.call import RecordMaker, Source

Asked = Sequence[tuple[Use, tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class Row:
    """Uses that share dummies."""

    uses: tuple[Use, ...]
    templates: tuple[Tensor, ...]
    """Templates of all uses, joined along the samples."""
    dim: int = 0

    def cut(self, x: Tensor | None) -> Sequence[Tensor | None]:
        """Split a tensor along the samples into one part per use."""
        n = len(self.uses)
        return [x] * n if x is None or n == 1 else x.chunk(n, self.dim)


def rows_of(asked: Asked, roots: Mapping[str, Source]) -> list[list[int]]:
    """Return, for each row, the places of its uses in `asked`."""
    counts = Counter(name for use, _ in asked for source in use.sources for name in source.roots)
    alike: dict[object, list[int]] = {}
    for i, (use, templates) in enumerate(asked):
        maker = None if use.copies else maker_to_join(use, templates, roots)
        if maker is None or any(counts[source.label] > 1 for source in use.sources):
            alike[i] = [i]
        else:
            alike.setdefault((maker, *[(x.shape, x.dtype, x.device) for x in templates]), []).append(i)
    return [row for some in alike.values() for row in ([some] if len(some) >= FEWEST else [[i] for i in some])]


def form_rows(asked: Asked, places: Sequence[Sequence[int]]) -> list[Row]:
    """Return the rows of uses at these places."""
    rows = []
    for some in places:
        use, templates = asked[some[0]]
        dim = use.build.axis.dim if isinstance(use.build, RecordMaker) else 0
        rows.append(Row(tuple([asked[i][0] for i in some]), _joined(templates, dim, len(some)), dim))
    return rows


def _joined(templates: tuple[Tensor, ...], dim: int, n: int) -> tuple[Tensor, ...]:
    if n == 1:
        return templates
    shapes = [(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]) for x in templates]
    return tuple([x.new_zeros(()).expand(shape) for x, shape in zip(templates, shapes, strict=True)])


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Facts about a region that are the same in every call."""

    rows: Sequence[Row]
    names: dict[int, list[str]]
    """Parameters by group."""
    places: tuple[slice, ...]
    """Place of each row's gradients among those of the slot."""
    anchors: list[int]

    def fits(self, rows: Sequence[Row]) -> bool:
        """Return True for these rows."""
        return len(rows) == len(self.rows) and all(
            row.uses == own.uses for row, own in zip(rows, self.rows, strict=True)
        )


def plan_region(rows: Sequence[Row], anchor_of: Mapping[str, int], group_of: Mapping[str, int]) -> RegionPlan:
    """Return the plan of these rows."""
    ends = accumulate((len(row.templates) for row in rows), initial=0)
    places = tuple(slice(start, end) for start, end in pairwise(ends))
    names: dict[int, list[str]] = {}
    for row in rows:
        for use in row.uses:
            for source in use.sources:
                for name in source.roots:
                    names.setdefault(group_of[name], []).append(name)
    anchors = sorted({anchor_of[name] for some in names.values() for name in some})
    return RegionPlan(rows, names, places, anchors)
