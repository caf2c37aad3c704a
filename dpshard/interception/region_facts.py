"""What dynamo takes for constants in a compiled region.

Dynamo guards every attribute that traced code reads. One guard, on the key of equal facts, stands for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpshard.clipping.region import Asked, Row
from dpshard.interception.batch_dims import CallKey, CallLayout
from dpshard.rules.call import Source


class RegionFacts(NamedTuple):
    """Facts of a region's trace. Equal blocks have equal facts, by number."""

    sources: Sequence[Source]
    """Of the region's tensors."""
    calls: Sequence[tuple[CallKey, CallLayout]]
    """Its layout. A dict made in the trace has no guards on missing keys."""
    labels: Sequence[Sequence[str]]
    """Labels of a use's sources, by use."""
    rows: Sequence[tuple[int, Sequence[int]]]
    """Dimension and uses, by row; see [Note: Rows of uses]."""


def uses_of(asked: Asked) -> Sequence[Sequence[str]]:
    """Return the labels of each use."""
    return tuple([tuple([source.label for source in use.sources]) for use, _ in asked])


def places_of(rows: Sequence[Row], places: Sequence[Sequence[int]]) -> Sequence[tuple[int, Sequence[int]]]:
    """Return dimension and uses of each row."""
    return tuple([(row.dim, tuple(some)) for row, some in zip(rows, places, strict=True)])


_KEYS: dict[object, str] = {}
_FACTS: dict[str, RegionFacts] = {}


def key_of(facts: RegionFacts) -> str:
    """Return one key for equal facts."""
    calls = tuple([(key, tuple(call.inputs), call.output, call.lost) for key, call in facts.calls])
    content = facts.sources, calls, facts.labels, facts.rows
    key = _KEYS.setdefault(content, f"region {len(_KEYS)}")
    _FACTS.setdefault(key, facts)
    return key


def facts_of(key: str) -> RegionFacts:
    """Return the facts, as constants of a trace."""
    return _FACTS[key]


setattr(facts_of, "_dynamo_marked_constant", True)  # noqa: B010 - as torch.compiler.assume_constant_result, without dynamo
