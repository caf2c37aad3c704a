"""The order in which this rank gathers units.

[Note: One order of gathers] A gather does not name its unit: ranks match gathers by their order. If a rank runs another
unit of the same size, all get a mixture of weights, without an error. Then one sample may change the gradients of all
ranks. So each rank digests the units that it gathers in forward, backward and evaluations, which may leave wrong
weights behind. Ranks compare digests before the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_PRIME = (1 << 61) - 1
_BASE = 1_000_003


class Gathers:
    """Digests the gathers of FSDP's parameter groups, which are numbered as on the other ranks."""

    def __init__(self) -> None:
        self.digest = 0
        """Below 2^61."""
        self._watched: list[Any] = []

    def watch(self, groups: Iterable[Any]) -> None:
        """Digest each gather of these groups; a group that is unsharded already does not gather."""
        for number, group in enumerate(groups, 1):
            group.unshard = partial(self._unshard, number, group, group.unshard)
            self._watched.append(group)

    def _unshard(self, number: int, group: Any, unshard: Callable[..., None], async_op: bool = False) -> None:
        before = group._all_gather_result
        unshard(async_op)
        if group._all_gather_result is not before:
            self.digest = (self.digest * _BASE + number) % _PRIME

    def detach(self) -> None:
        """Restore FSDP."""
        for group in self._watched:
            del group.unshard
        self._watched.clear()
