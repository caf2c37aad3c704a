"""Rows of a micro-batch that a schedule hands over in chunks: together they must be its samples, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpshard.interception.rows.doubts import Doubts
from dpshard.interception.rows.identity import RowIdentity
from dpshard.interception.run import Run
from dpshard.sampling import MicroBatchPlan


class Together:
    """Checks the inputs of all chunks together, once the last chunk is there."""

    def __init__(self, plan: MicroBatchPlan, data: Any, count: int) -> None:
        self._plan, self._data, self._count = plan, data, count
        self._runs: dict[int, Run] = {}

    def add(self, index: int, run: Run, doubts: Doubts, *, mean: bool) -> None:
        """Take the inputs of chunk `index`. The last raises LogicalBatchError if all together are not the samples."""
        self._runs[index] = run
        if len(self._runs) == self._count:
            RowIdentity(self._plan, self._data, doubts, mean=mean).enter(
                _joined([run for _, run in sorted(self._runs.items())])
            )
            self._runs.clear()


class PartIdentity(RowIdentity):
    """Watches one chunk of a micro-batch."""

    def __init__(
        self, plan: MicroBatchPlan, data: Any, doubts: Doubts, *, mean: bool, index: int, together: Together
    ) -> None:
        super().__init__(plan, data, doubts, mean=mean)
        self._index, self._together, self._mean = index, together, mean

    def enter(self, run: Run) -> None:
        """Check the inputs of this chunk and, with the last one, of all chunks together."""
        super().enter(run)
        self._together.add(self._index, run, self._doubts, mean=self._mean)


def _joined(runs: Sequence[Run]) -> Run:
    """Return a Run of the joined inputs. An input that lacks samples in one chunk counts as one without."""
    first = runs[0]
    dims = tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*(run.dims for run in runs), strict=True))
    given = list(first.given)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for i, dim in enumerate(dims):
            if dim is not None and isinstance(given[i], Tensor):
                given[i] = torch.cat([run.given[i] for run in runs], dim)
    return replace(first, given=tuple(given), dims=dims)
