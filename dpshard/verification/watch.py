"""A signature of what a model holds and gets, cheap enough for every forward: what was never seen is news.

It reads identities, versions, lengths and shapes, and values of integers on the CPU: no accelerator is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from dpshard.interception import Run, is_own, kind_of_value

_CONTAINERS = (list, dict, set, deque)


class Watch:
    """What was seen of a model's attributes and buffers, and of its inputs."""

    def __init__(self) -> None:
        self._places: list[tuple[str, dict[str, Any]]] = []  # attributes and buffers of every module, by its path
        self._identities: list[tuple[int, ...]] = []
        self._held: list[tuple[str, Any]] = []  # what may change in place
        self._counts: list[int] = []
        self._kinds: dict[str, Any] = {}  # of every attribute and buffer
        self._seen: set[tuple[str, Any]] = set()
        self._counters: tuple[str, ...] = ()
        self._lengths: set[int] = set()
        self._characters: set[Any] = set()

    @property
    def lengths_vary(self) -> bool:
        """Whether micro-batches have come in several lengths."""
        return len(self._lengths) > 1

    def news(self, run: Run) -> bool:
        """Whether the model's state, or its inputs, changed as they never did before."""
        return self.changes() | self._is_longer(run) | self._has_character(run)

    def changes(self) -> bool:
        """Whether an attribute or a buffer changed as it never did before."""
        identities, counts = self._identify(), self._count()
        if identities == self._identities and counts == self._counts:
            return False
        found = {
            (path, "in place")
            for (path, _), count, before in zip(self._held, counts, self._counts, strict=True)
            if count != before
        }
        before = self._kinds
        self._note()
        found |= {(path, kind) for path, kind in self._kinds.items() if path not in before or before[path] != kind}
        found |= {(path, None) for path in before.keys() - self._kinds.keys()}
        new = {(path, kind) for path, kind in found - self._seen if not path.startswith(self._counters)}
        self._seen |= found
        return bool(new)

    def accept(self, model: nn.Module, counters: Collection[str]) -> None:
        """Take the state as verified; `counters` are the paths that forward changes whatever the samples are."""
        self._counters = tuple({*self._counters, *counters})
        modules = list(model.named_modules())
        self._places = [(path, vars(module)) for path, module in modules]
        self._places += [(path, module._buffers) for path, module in modules]
        self._note()

    def _note(self) -> None:
        self._identities = self._identify()
        self._kinds, self._held = {}, []
        for prefix, held in self._places:
            for name, x in held.items():
                if not is_own(name):
                    continue
                path = f"{prefix}.{name}" if prefix else name
                self._kinds[path] = (type(x).__name__, kind_of_value(x))
                if isinstance(x, Tensor) or type(x) in _CONTAINERS:
                    self._held.append((path, x))
        self._counts = self._count()

    def _identify(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, held.values())) for _, held in self._places]

    def _count(self) -> list[int]:
        return [x._version if isinstance(x, Tensor) else len(x) for _, x in self._held]

    def _is_longer(self, run: Run) -> bool:
        sizes = [n for x, dim in _samples(run) for d, n in enumerate(x.shape) if d != dim]
        length, known = max(sizes, default=0), self._lengths
        longer, first_other = length > max(known, default=0), len(known) == 1 and length not in known
        known.add(length)
        return longer or first_other

    def _has_character(self, run: Run) -> bool:
        """Whether integers are negative (ignored labels), or beyond a length (positions cut off), as never before."""
        lengths = {x.shape[1] for x, dim in _samples(run) if dim == 0 and x.dim() > 1}
        character = tuple(
            (bool(x.amin() < 0), *(sorted(bool(x.amax() >= n) for n in lengths) if x.dim() == 1 else ()))
            for x, _ in _samples(run)
            if x.device.type == "cpu" and x.numel() and not x.is_floating_point() and not x.is_complex()
        )
        new = character not in self._characters
        self._characters.add(character)
        return new


def _samples(run: Run) -> list[tuple[Tensor, int]]:
    return [(x, dim) for x, dim in zip(run.leaves, run.dims, strict=True) if dim is not None]
