"""Finds parameters that a script writes between the first forward of a logical batch and its release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpshard.errors import LogicalBatchError

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Part(NamedTuple):
    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Writes:
    """Compares parameters with what they were at `note`; `local` returns this rank's part of one.

    Torch counts writes, except for those through `.data`, and by torch._foreach_* to shards. So notes 1, 2, 4, 8, ...
    keep the sum of the bits of this rank's values, too. It depends on no order of summation.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], local: Callable[[Tensor], Tensor]) -> None:
        self._parameters, self._local = parameters, local
        self._versions: dict[str, int] = {}
        self._sums: dict[_Part, Tensor] = {}
        self._noted = 0

    def note(self) -> None:
        """Store the state before the first gradient of a logical batch."""
        self._versions = {name: p._version for name, p in self._parameters.items()}
        self._noted += 1
        self._sums = self._bit_sums() if self._noted & (self._noted - 1) == 0 else {}

    def first(self) -> str | None:
        """Return the name of a parameter that torch counts as written, if any."""
        return next(self._counted(), None)

    def fault(self) -> LogicalBatchError | None:
        """Return the error if this rank wrote a parameter, unless it wrote zeros."""
        for name in (*self._counted(), *self._changed()):
            if bool(self._part(name).any()):  # zeros hold nothing of a clipped sum
                return LogicalBatchError(updated_early(name))
        return None

    def _counted(self) -> Iterator[str]:
        for name, version in self._versions.items():
            if self._parameters[name]._version != version:
                yield name

    def _changed(self) -> list[str]:
        before, now = self._sums, self._bit_sums() if self._sums else {}
        both = [key for key in before if key in now]
        if not both:
            return []
        differ = torch.stack([(before[key] != now[key]).to(both[0].device) for key in both])
        return [key.name for key, differs in zip(both, differ.tolist(), strict=True) if differs]

    def _bit_sums(self) -> dict[_Part, Tensor]:
        found = {}
        for name in self._parameters:
            part = self._part(name)
            # Frameworks gather, free and move parts; only what stayed is compared.
            if type(part) is Tensor and part.itemsize in _INTEGER:
                key = _Part(name, part.shape, part.dtype, part.device)
                integer = _INTEGER[part.itemsize]
                found[key] = part.view(integer).sum(dtype=integer)
        return found

    def _part(self, name: str) -> Tensor:
        return self._local(self._parameters[name].detach())


def updated_early(name: str) -> str:
    """Say why no parameter may change before the release."""
    return (
        f"{name} was written after backward(), and before its gradient got noise. An update by hand needs "
        f"engine.privatize() first. If this was one, it used clipped sums without noise, and the weights are not "
        f"private: return to weights from before it. Other writes belong between a step and the next forward."
    )
