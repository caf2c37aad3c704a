"""Watch a model and its inputs for new kinds of values, without waiting for an accelerator.

[Note: What is watched]
Attributes, buffers, sub-modules and hooks of every module are watched, with the contents of collections and objects
among them. A float changes its kind at powers of two, so verifications grow with the logarithm of the steps. Flags and
strings have separate limits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpshard.interception import HOOKS, Run, container, is_own, kind_of_object, kind_of_value, parts_of

MOST_NEWS = 8
"""Most verifications that changes of one attribute cause."""
_MOST_ITEMS = 256
"""Largest collection whose items are watched; of a longer one, only the length is."""
_MOST_HELD = 2_000
_DEEPEST = 5

Signature = tuple[list[int], list[int], list[int], list[int]]


class Watch:
    """The kinds of attributes, buffers and inputs so far."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._sized: list[Any] = []  # objects with a length
        self._owners: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._lists: list[Any] = []
        self._tensors: list[Tensor] = []
        self._in_place: list[tuple[str, Any, int]] = []  # path, object, length or version
        self._signature: Signature | None = None
        self._handles = -1
        self._hooks: list[dict[Any, Any]] = []
        self._hooking: list[dict[Any, Any]] = []
        self._hooked: list[int] = []
        self._kinds: dict[str, Any] = {}  # by path
        self._seen: set[tuple[str, Any]] = set()
        self._spent: Counter[str] = Counter()
        self._counters: tuple[str, ...] = ()
        self._lengths: dict[Any, set[int]] = {}  # of each dimension of each input
        self._characters: set[Any] = set()

    @property
    def lengths_vary(self) -> bool:
        """True if micro-batches came in several lengths."""
        return any(len(known) > 1 for known in self._lengths.values())

    def take_news(self, run: Run, step: int) -> bool:
        """Return True, once, if the model or its inputs have changed to a new kind."""
        longer = self._is_longer(run) and self._may_spend("(length)", step)
        return self.take_changes(step) | longer | self._take_new_values(run)

    def take_changes(self, step: int) -> bool:
        """Return True, once, if the model has changed to a new kind."""
        if self._model is None or (self._sign() == self._signature and not self._has_other_hooks()):
            return False
        kinds, places = self._kinds, self._in_place
        found = {(path, "in place") for path, x, count in places if _count(x) != count}
        self._note(self._model)
        found |= {(path, kind) for path, kind in self._kinds.items() if path not in kinds or kinds[path] != kind}
        found |= {(path, None) for path in kinds.keys() - self._kinds.keys()}
        new = {(path, kind) for path, kind in found - self._seen if not self._is_counter(path)}
        self._seen |= found
        spent = [self._may_spend(name, step) for name in {_ration(path, kind) for path, kind in new}]
        return any(spent)

    def accept(self, model: nn.Module, counters: Collection[str]) -> None:
        """Take the state as verified. `counters` change in every forward, whatever the samples."""
        self._counters = tuple({*self._counters, *counters})
        self._model = model
        self._note(model)

    def _is_counter(self, path: str) -> bool:
        return path in self._counters or path.startswith(tuple(f"{name}[" for name in self._counters))

    def _may_spend(self, name: str, step: int) -> bool:
        self._spent[name] += 1
        return self._spent[name] <= MOST_NEWS + 2 * step.bit_length()

    def _note(self, model: nn.Module) -> None:
        self._sized, self._owners, self._keys, self._lists, self._tensors = [], [], [], [], []
        self._in_place, self._kinds, self._hooks = [], {}, []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            path, own = f"{prefix}." if prefix else "", vars(module)
            modules, buffers = parts_of(module)
            self._sized += (own, buffers, modules)
            self._look_up(modules, modules, f"{path}(modules)")
            self._look_up(buffers, buffers, path, seen)
            names = [name for name in own if is_own(name) or name == "forward"]
            self._look_up(own, names, path, seen)
            hooks = [own[name] for name in HOOKS]
            self._hooks += hooks
            self._kinds[f"{path}(hooks)"] = tuple(map(id, chain.from_iterable(map(dict.values, hooks))))
        self._signature, self._handles = self._sign(), RemovableHandle.next_id
        self._hooking = [hooks for hooks in self._hooks if hooks]
        self._hooked = self._hook_ids()

    def _look_up(
        self, owner: dict[Any, Any], keys: Collection[Any], path: str, seen: set[int] | None = None, depth: int = 0
    ) -> None:
        for key in keys:
            x, place = owner[key], f"{path}[{key}]" if depth else f"{path}{key}"
            self._owners.append(owner)
            self._keys.append(key)
            if seen is None or (key == "forward" and not depth):
                self._kinds[place] = id(x)
            else:
                self._kinds[place] = _kind(x)
                self._look_into(place, x, seen, depth)

    def _look_into(self, path: str, x: Any, seen: set[int], depth: int) -> None:
        if isinstance(x, Tensor):
            if not x.is_inference():
                self._tensors.append(x)
                self._in_place.append((path, x, x._version))
            return
        if isinstance(x, (str, bytes, int, float, nn.Module)) or x is None or id(x) in seen:
            return
        seen.add(id(x))
        sized = type(x) in (list, dict, set, deque)
        if sized:
            self._sized.append(x)
            self._in_place.append((path, x, len(x)))
        if depth == _DEEPEST or len(seen) > _MOST_HELD or (sized and len(x) > _MOST_ITEMS):
            return
        if isinstance(x, dict):
            self._look_up(x, x, path, seen, depth + 1)
        elif isinstance(x, list | tuple | deque):
            self._lists.append(x)
            # The position of an item does not matter.
            self._kinds[f"{path}[]"] = frozenset(_kind(item) for item in x)
            for item in x:
                self._look_into(f"{path}[]", item, seen, depth + 1)
        elif container(x) is not None and hasattr(x, "__dict__") and not callable(x):
            self._sized.append(vars(x))
            self._look_up(vars(x), vars(x), path, seen, depth + 1)

    def _sign(self) -> Signature:
        return (
            list(map(len, self._sized)),
            list(map(id, map(dict.get, self._owners, self._keys))),
            list(map(id, chain.from_iterable(self._lists))),
            [x._version for x in self._tensors],
        )

    def _has_other_hooks(self) -> bool:
        if self._handles == RemovableHandle.next_id:
            return False
        self._handles = RemovableHandle.next_id
        return self._hooked != self._hook_ids()

    def _hook_ids(self) -> list[int]:
        # Most are empty, and to count them is cheaper.
        return [sum(map(len, self._hooks)), *map(id, chain.from_iterable(map(dict.values, self._hooking)))]

    def _is_longer(self, run: Run) -> bool:
        longer = False
        for i, (x, dim) in enumerate(run.carrying()):
            for d, length in enumerate(x.shape):
                if d != dim:
                    known = self._lengths.setdefault((run.module, run.tree, i, d), set())
                    first_other = len(known) == 1 and length not in known
                    longer = longer or length > max(known, default=0) or first_other
                    known.add(length)
        return longer

    def _take_new_values(self, run: Run) -> bool:
        """Return True, once, for integers of a new sign, or indices beyond a length."""
        lengths = {x.shape[1] for x, dim in run.carrying() if dim == 0 and x.dim() > 1}
        character = tuple(
            (bool(x.amin() < 0), *(sorted(bool(x.amax() >= n) for n in lengths) if x.dim() == 1 else ()))
            for x, _ in run.carrying()
            if x.device.type == "cpu" and x.numel() and not x.is_floating_point() and not x.is_complex()
        )
        new = character not in self._characters
        self._characters.add(character)
        return new


def _kind(x: Any) -> Any:
    return (type(x).__name__, kind_of_object(x) if callable(x) else kind_of_value(x))


def _count(x: Any) -> int:
    return x._version if isinstance(x, Tensor) else len(x)


def _ration(path: str, kind: Any) -> str:
    """Return the name under which changes are limited: the path for a flag or string, the attribute for a number."""
    exact = isinstance(kind, tuple) and len(kind) == 2 and isinstance(kind[1], (bool, str))
    return path if exact else f"{path.partition('[')[0]}[]"
