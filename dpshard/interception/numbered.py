"""Sources of a compiled region, by number.

Dynamo guards on every string, so with names, equal blocks could not share a graph.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from dpshard.clipping.tape import Use
from dpshard.interception.batch_dims import CallKey, CallLayout, Layout
from dpshard.records import Record
from dpshard.rules.call import RecordMaker, Source

_LABEL = re.compile(r"source#(\d+)")


class Numbering:
    """Numbers of the sources of one region."""

    def __init__(self) -> None:
        self.names: list[Source] = []
        """Outside sources, by number."""
        self._numbered: dict[Source, Source] = {}
        self._named: dict[Source, Source] = {}

    def number(self, source: Source) -> Source:
        """Return the number, a root of the region, of an outside source."""
        if source not in self._numbered:
            transpose_of = source.transpose_of and self.number(source.transpose_of)
            slice_of = source.slice_of and (self.number(source.slice_of[0]), source.slice_of[1])
            flags = source.isometric, source.exact
            numbered = _root(f"source#{len(self.names)}", source.shape, *flags, transpose_of, slice_of)
            self.names.append(source)
            self._numbered[source], self._named[numbered] = numbered, source
        return self._numbered[source]

    def knows(self, source: Source) -> bool:
        """Return True for a numbered source."""
        return source in self._numbered

    def name(self, source: Source) -> Source:
        """Return the outside source of a numbered one."""
        if source not in self._named:
            self._named[source] = self._derived(source)
        return self._named[source]

    def name_use(self, use: Use) -> Use:
        """Return the use with outside sources."""

        def build(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
            return [(self.name(source), record) for source, record in use.records(tensors)]

        sources = tuple(map(self.name, use.sources))
        return Use(sources, use.build if isinstance(use.build, RecordMaker) else build, use.copies)

    def name_all(self, text: str, kind: Literal["label", "form"] = "label") -> str:
        """Replace the numbers in a text by outside labels, or forms."""
        return _LABEL.sub(lambda match: getattr(self._outside(match[0]), kind), text)

    def _outside(self, label: str) -> Source:
        return self.names[int(label.rpartition("#")[2])]

    def _derived(self, source: Source) -> Source:
        outside = {label: self._outside(label) for label in source.roots}

        def recompute(values: dict[str, Tensor]) -> Tensor:
            return source.recompute({label: root.recompute(values) for label, root in outside.items()})

        return Source(
            label=self.name_all(source.label),
            form=self.name_all(source.form, "form"),
            roots=tuple(dict.fromkeys(name for root in outside.values() for name in root.roots)),
            shape=source.shape,
            recompute=recompute,
            isometric=source.isometric,
            exact=source.exact,
            transpose_of=source.transpose_of and self.name(source.transpose_of),
            slice_of=source.slice_of and (self.name(source.slice_of[0]), source.slice_of[1]),
        )


@functools.cache
def _root(
    label: str,
    shape: tuple[int, ...],
    isometric: bool,
    exact: bool,
    transpose_of: Source | None,
    slice_of: tuple[Source, int] | None,
) -> Source:
    # Cached, so equal blocks share it.
    def recompute(values: dict[str, Tensor]) -> Tensor:
        return values[label]

    return Source(label, label, (label,), shape, recompute, isometric, exact, transpose_of, slice_of)


class NumberedSources(dict[Tensor, Source]):
    """Sources of a rehearsal; each gets its number when it is read first."""

    def __init__(self, numbering: Numbering, outside: dict[Tensor, Source]) -> None:
        super().__init__(outside)
        self._numbering, self._outside = numbering, set(outside)

    def __getitem__(self, x: Tensor) -> Source:
        if x in self._outside:
            self._outside.remove(x)
            self[x] = self._numbering.number(super().__getitem__(x))
        return super().__getitem__(x)


class NumberedLayout(dict[CallKey, CallLayout]):
    """Layouts of the calls of a rehearsal, under keys with numbered sources."""

    def __init__(self, numbering: Numbering, outside: Layout) -> None:
        super().__init__()
        self._numbering, self._outside = numbering, outside

    def get(self, key: CallKey, default: CallLayout | None = None) -> CallLayout | None:  # type: ignore[override]
        """Return the outside layout of a call, and keep it under this key."""
        named = tuple(self._numbering.name_all(x, "form") if isinstance(x, str) else x for x in key)
        layout = self._outside.get(named, default)
        if layout is not None:
            self[key] = layout
        return layout
