"""Verify that collate_fn treats samples separately.

Half of the rows become copies of one sample; the other half must not change. Nothing is compared if the random
generators end in different states. Rows may be sorted and padded. If lengths differ, only cuts are detected. If no
random numbers are drawn, reversed units must give reversed output.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from dpshard.errors import VerificationError
from dpshard.interception import GENERATORS, access_to, walk_through
from dpshard.randomness import host_states, restore_host
from dpshard.sampling.units import are_plain

ROUNDING = 1e-4
"""Largest difference by rounding, relative to the largest number of a row."""
SPLITS = 2
SEEDS = 24
"""Seeds to confirm a fault."""


def verified_collation(
    collate_fn: Callable[[list[Any]], Any] | None, rows_per_unit: int = 1
) -> Callable[[list[Any]], Any] | None:
    """Return a `collate_fn` that is verified when it is called; torch's own as it is."""
    return collate_fn if collate_fn in (None, default_collate) else CollationVerified(collate_fn, rows_per_unit)


class CollationVerified:
    """Calls `collate_fn`; verifies calls 1, 2, 4, 8, ... of a process."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], rows_per_unit: int = 1) -> None:
        self.collate_fn = collate_fn
        self._rows_per_unit = rows_per_unit
        self._calls = 0

    def __call__(self, rows: list[Any]) -> Any:
        """Return the result of collate_fn, verified."""
        self._calls += 1
        if self._calls & (self._calls - 1) or not isinstance(rows, list) or len(rows) < 2:
            return self.collate_fn(rows)
        generators = _Generators(self.collate_fn)
        kept, before = _copied(rows), generators.states()
        data = self.collate_fn(rows)
        after = generators.states()
        try:
            self._verify(kept, generators, before)
        finally:
            generators.restore(after)
        return data

    def _values(self, rows: list[Any]) -> list[Any] | None:
        try:
            return list(_with_rows(self.collate_fn(_copied(rows)), len(rows)))
        except Exception:  # noqa: BLE001 - user code may raise anything on an invented micro-batch
            return None

    def _verify(self, rows: list[Any], generators: _Generators, begin: list[Any]) -> None:
        unit = self._rows_per_unit

        def run(rows: list[Any], begin: list[Any]) -> tuple[list[Any] | None, Any]:
            generators.restore(begin)
            return self._values(rows), _frozen(generators.states())

        expected, end = run(rows, begin)
        again, _ = run(rows, begin)
        if not expected or again is None or not _alike(expected, again, list(range(len(rows)))):
            return  # it draws from generators that cannot be reset
        if unit > 1 and end == _frozen(begin):
            reverse = [i for start in range(len(rows) - unit, -1, -unit) for i in range(start, start + unit)]
            found, _ = run([rows[i] for i in reverse], begin)
            if found is not None and not _alike([_picked(x, reverse) for x in expected], found, list(range(len(rows)))):
                raise VerificationError(_SCATTERS)
        draws, shuffled = end != _frozen(begin), np.random.default_rng((len(rows), self._calls)).permutation
        suspects = []
        for _ in range(SPLITS):
            order = shuffled(len(rows)).tolist()
            for kept in (order[: len(rows) // 2], order[len(rows) // 2 :]):
                others = [row if i in kept else rows[kept[0]] for i, row in enumerate(rows)]
                found, other_end = run(others, begin)
                if found is None:
                    continue
                if end != other_end:
                    return  # the content of a row decides how many numbers are drawn
                if (fault := _fault(expected, found, kept)) is not None:
                    suspects.append((fault, others, kept))
        for fault, others, kept in suspects:
            faults = 0
            for seed in range(SEEDS if draws else 0):
                generators.seed(seed)
                start = generators.states()
                (one, end_of_one), (other, end_of_other) = run(rows, start), run(others, start)
                if one is None or other is None or end_of_one != end_of_other:
                    return
                faults += _fault(one, other, kept) is not None
            if not draws or faults > SEEDS // 4:
                raise VerificationError(fault)


def _fault(expected: list[Any], found: list[Any], kept: list[int]) -> str | None:
    if list(map(_shape, expected)) == list(map(_shape, found)):
        same = _alike(expected, found, kept) or _sorted(expected, found, len(kept))
        return None if same else _MIXES
    if len(expected) != len(found):
        return None
    rests = [_rest(x, y, kept) for x, y in zip(expected, found, strict=True)]
    return _CUTS if None not in rests and any(rests) else None


_PER_SAMPLE = (
    "so one sample counts in the gradients of others, and clipping does not bound it. Do it in the data set, for each "
    "sample by itself."
)
_MIXES = (
    f"collate_fn gives a sample other values if the other samples change: it replaces rows (corrupt rows by good "
    f"ones), mixes them (mixup, CutMix), or scales them by a statistic of the whole micro-batch, {_PER_SAMPLE} A "
    f"sample that cannot be read may be blank; a value that all samples share must be public."
)
_SCATTERS = (
    "collate_fn reorders the rows of units, for example by length. So rows of several units would be clipped as one. "
    "Keep the rows of each unit side by side, in their order; "
    "pack_padded_sequence(enforce_sorted=False) takes unsorted rows."
)
_CUTS = f"collate_fn cuts samples to the length of the shortest, {_PER_SAMPLE} Or pad to the longest, with a mask."


# --- output ---------------------------------------------------------------------------------------------------------


def _with_rows(data: Any, n: int) -> Iterator[Any]:
    if isinstance(data, np.ndarray) and data.dtype != object:
        data = torch.as_tensor(data) if data.dtype.kind in "biufc" else data.tolist()
    if isinstance(data, Tensor):
        if data.layout is torch.strided and data.dim() > 0 and len(data) == n:
            yield data.detach()
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _with_rows(value, n)
    elif isinstance(data, (tuple, list)):
        if len(data) == n and are_plain(data):
            yield list(data)
        else:
            for value in data:
                yield from _with_rows(value, n)
    elif is_dataclass(data) and not isinstance(data, type):
        for field in fields(data):
            yield from _with_rows(getattr(data, field.name), n)


def _shape(x: Any) -> Any:
    return (x.dtype, x.shape) if isinstance(x, Tensor) else len(x)


def _alike(expected: list[Any], found: list[Any], kept: list[int]) -> bool:
    if list(map(_shape, expected)) != list(map(_shape, found)):
        return False
    return all(
        _equal(x[kept], y[kept]) if isinstance(x, Tensor) else _picked(x, kept) == _picked(y, kept)
        for x, y in zip(expected, found, strict=True)
    )


def _picked(x: Any, kept: list[int]) -> Any:
    return x[kept] if isinstance(x, Tensor) else [x[i] for i in kept]


def _equal(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return torch.equal(x, y)
    if not x.numel():
        return True
    x, y = x.reshape(len(x), -1), y.reshape(len(y), -1)
    allowed = ROUNDING * x.abs().nan_to_num(0, 0, 0).amax(1, keepdim=True)
    return bool(((x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= allowed)).all())


def _sorted(expected: list[Any], found: list[Any], kept: int) -> bool:
    def rows(leaves: list[Any]) -> list[str]:
        columns = [x.flatten(1).tolist() if isinstance(x, Tensor) and x.dim() > 1 else list(x) for x in leaves]
        return [repr([column[i] for column in columns]) for i in range(len(columns[0]))]

    there = set(rows(found))
    return sum(row in there for row in rows(expected)) >= kept


def _rest(x: Any, y: Any, kept: list[int]) -> bool | None:
    """Return True if the longer one adds more than padding; None if the common parts differ."""
    if _shape(x) == _shape(y):
        return False if _alike([x], [y], kept) else None
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype or x.dim() != y.dim():
        return None
    dims = [d for d in range(x.dim()) if x.shape[d] != y.shape[d]]
    if len(dims) != 1:
        return None
    short, long = sorted((x[kept].movedim(dims[0], 1), y[kept].movedim(dims[0], 1)), key=lambda z: z.shape[1])
    n = short.shape[1]
    for same, rest in ((long[:, :n], long[:, n:]), (long[:, -n:], long[:, :-n])):
        if n and torch.equal(same, short):
            rest = rest.nan_to_num() if rest.is_floating_point() else rest
            return bool((rest != rest[:1]).any() and (rest != rest[:, :1]).any())
    return None


# --- input ----------------------------------------------------------------------------------------------------------


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, MutableMapping):
        twin = copy.copy(x)
        for key, value in x.items():
            twin[key] = _copied(value)
        return twin
    if type(x) in (list, tuple):
        return type(x)(_copied(item) for item in x)
    return copy.copy(x) if is_dataclass(x) and not isinstance(x, type) else x


class _Generators:
    """The random generators of torch, NumPy and Python, and those that a function holds."""

    def __init__(self, function: Any) -> None:
        held = [x for x in walk_through("", function).values() if isinstance(x, GENERATORS)]
        self._own = [(x, access) for x in held if (access := access_to(x)) is not None]

    def states(self) -> list[Any]:
        own = (copy.deepcopy(read(x)) for x, (read, _) in self._own)
        return [*host_states(), *own]

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        for generator, _ in self._own:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed)

    def restore(self, states: list[Any]) -> None:
        restore_host(states[:3])
        for (generator, (_, write)), state in zip(self._own, states[3:], strict=True):
            write(generator, state)


def _frozen(x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x.numpy()
    if isinstance(x, np.ndarray):
        return x.tobytes()
    if isinstance(x, dict):
        return [(key, _frozen(value)) for key, value in x.items()]
    return [_frozen(item) for item in x] if isinstance(x, (list, tuple)) else x
