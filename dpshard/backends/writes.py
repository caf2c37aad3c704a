"""Finds parameters that a script writes between the first forward of a logical batch and its release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpshard.backends.checksums import checksums
from dpshard.errors import LogicalBatchError


class _Part(NamedTuple):
    """A parameter, and what its checksum depends on besides its values."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    offset: int


class Writes:
    """Compares parameters with what they were at `note`; `local` returns this rank's part of one.

    Torch counts writes, except for those through `.data`, and by torch._foreach_* to shards. So releases 1, 2, 4, and
    every eighth compare checksums of this rank's values, too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], local: Callable[[Tensor], Tensor]) -> None:
        self._parameters, self._local = parameters, local
        self._versions: dict[str, int] = {}
        self._checksums: dict[_Part, Tensor] = {}
        self._release = 1  # the next one

    def note(self) -> None:
        """Store the state before the first gradient of a logical batch; several forwards may precede it."""
        self._versions = {name: p._version for name, p in self._parameters.items()}
        self._checksums = self._compute_checksums() if _compares_values(self._release) else {}

    def counted_write(self) -> str | None:
        """Return the name of a parameter that torch counts as written, if any."""
        return next(self._counted(), None)

    def fault(self) -> LogicalBatchError | None:
        """Return the error of this release if this rank wrote a parameter, unless it wrote zeros."""
        release, self._release = self._release, self._release + 1
        counted = list(self._counted())
        for name in (*counted, *self._changed()):
            if bool(self._part(name).any()):  # zeros hold nothing of a clipped sum
                return LogicalBatchError(updated_early(name, 0 if name in counted else _uncompared_before(release)))
        return None

    def _counted(self) -> Iterator[str]:
        for name, version in self._versions.items():
            if self._parameters[name]._version != version:
                yield name

    def _changed(self) -> list[str]:
        before, now = self._checksums, self._compute_checksums() if self._checksums else {}
        both = [part for part in before if part in now]
        if not both:
            return []
        differ = torch.stack([before[part] for part in both]) != torch.stack([now[part] for part in both])
        return [part.name for part, differs in zip(both, differ.tolist(), strict=True) if differs]

    def _compute_checksums(self) -> dict[_Part, Tensor]:
        parts = {name: self._part(name) for name in self._parameters}
        # Frameworks gather, free and move parts; only what stayed is compared.
        plain = {name: x for name, x in parts.items() if type(x) is Tensor and x.itemsize > 1}
        names, sums_N = checksums(plain) if plain else ([], ())
        return {_described(name, plain[name]): x for name, x in zip(names, sums_N, strict=True)}

    def _part(self, name: str) -> Tensor:
        return self._local(self._parameters[name].detach())


def _compares_values(release: int) -> bool:
    return release in (1, 2, 4) or release % 8 == 0


def _uncompared_before(release: int) -> int:
    """Return how many releases in a row, up to the one before, compared no values."""
    return release - 1 - max(n for n in range(release) if _compares_values(n))


def _described(name: str, x: Tensor) -> _Part:
    return _Part(name, x.shape, x.dtype, x.device, x.stride(), int(x.storage_offset()))


def updated_early(name: str, uncompared: int = 0) -> str:
    """Say why no parameter may change before the release; `uncompared` releases before it compared no values."""
    message = (
        f"{name} was written after backward(), and before its gradient got noise. An update by hand needs "
        f"engine.privatize() first. If this was one, it used clipped sums without noise, and the weights are not "
        f"private: return to weights from before it. Other writes belong between a step and the next forward."
    )
    if uncompared:
        message += f" The {uncompared} release(s) before this one did not compare values, and may be like it."
    return message
