"""Fingerprints of the rows in a user's own loop.

A sample is one row, or unit of rows, of all inputs of a forward together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpshard.interception.rows.fingerprints import Rows, mixed
from dpshard.interception.run import Run


class OwnLoopRows:
    """The fingerprints of the samples since the last release, each sample once."""

    def __init__(self) -> None:
        self._fed: list[Tensor] = []

    def enter(self, run: Run) -> None:
        """Do nothing: before a probe, it is unknown which inputs carry samples."""

    def read(self, run: Run) -> None:
        """Add the samples, after a probe: the rows of a mask [T, T], T = B, do not belong to samples."""
        hash_B = torch.zeros((), dtype=torch.int64)
        for place, (x, dim) in enumerate(run.carrying()):
            of_x = Rows.of(x, dim).hash_of_units(run.rows_per_unit)
            hash_B = hash_B.to(of_x.device) + mixed(of_x + place)
        self._fed.append(hash_B)

    def leave(self, output: Any) -> None:
        """Do nothing."""

    def fingerprints(self) -> Tensor:
        """Return the hash of every sample, int64 [n]."""
        return torch.cat(self._fed) if self._fed else torch.zeros(0, dtype=torch.int64)

    def clear(self) -> None:
        """Forget all samples."""
        self._fed.clear()
