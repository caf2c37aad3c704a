"""The facts that are constants in the trace of a compiled region.

Dynamo guards every attribute that traced code reads. One guard, on the key of equal facts, stands for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpshard.interception.batch_dims import CallKey, CallLayout
from dpshard.rules.call import Source


class RegionFacts(NamedTuple):
    """Facts of a region's trace. Equal blocks have equal facts, by number."""

    sources: Sequence[Source]
    """The source of each of the region's tensors."""
    calls: Sequence[tuple[CallKey, CallLayout]]
    """The layout, as items. Dynamo does not guard missing keys of a dict that the trace makes from them."""
    slots: str
    """Calls, labels and rows of the slots, as text; see slot_facts."""


_KEYS: dict[object, str] = {}
_FACTS: dict[str, RegionFacts] = {}


def key_of(facts: RegionFacts) -> str:
    """Return one key for equal facts."""
    calls = tuple([(key, tuple(call.inputs), call.output, call.lost) for key, call in facts.calls])
    key = _KEYS.setdefault((facts.sources, calls, facts.slots), f"region {len(_KEYS)}")
    _FACTS.setdefault(key, facts)
    return key


def facts_of(key: str) -> tuple[Sequence[Source], Sequence[tuple[CallKey, CallLayout]], str]:
    """Return the facts, as constants of a trace. Dynamo of torch 2.11 takes no NamedTuple."""
    sources, calls, slots = _FACTS[key]
    return sources, calls, slots


setattr(facts_of, "_dynamo_marked_constant", True)  # noqa: B010 - as torch.compiler.assume_constant_result, without dynamo
