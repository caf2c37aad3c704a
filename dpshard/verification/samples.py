"""Choose the samples to compare, and change their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.interception import Run
from dpshard.verification.objectives import Loss

SAMPLES = 3
"""Number of compared samples: two of them can affect the third."""
OUTLIER = 1e3
"""Factor by which the numbers of an outlier are scaled."""


def pick(run: Run, loss: Loss | None, start: int = 0, n: int = SAMPLES) -> list[int]:
    """Return up to n different rows, from `start` on."""
    n = min(n, run.rows)
    if n == run.rows:
        return list(range(n))
    features = _features(run, loss)
    chosen = [start % run.rows]
    while len(chosen) < n:
        nearest = np.stack([np.abs(features - features[i]).sum(1) for i in chosen]).min(0)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return sorted(chosen)


def _features(run: Run, loss: Loss | None) -> NDArray[np.float64]:
    """Return features [rows, F] between 0 and 1."""
    columns = []
    targets = () if loss is None else loss.targets
    tensors = [(x, d) for x, d in zip(run.leaves, run.dims, strict=True) if d is not None] + [(t, 0) for t in targets]
    for x, dim in tensors:
        if x.shape[dim] < run.rows or x.is_complex() or x.numel() == 0:
            continue
        wide = x.detach().narrow(dim, 0, run.rows).movedim(dim, 0).reshape(run.rows, -1).to(torch.float64)
        wide = wide.nan_to_num().clamp(-1e30, 1e30)  # their sums stay finite
        columns += [wide.mean(1), wide.amax(1), wide.amin(1), (wide[:, 1:] == wide[:, :-1]).sum(1).double()]
        # The most common value may be padding, or an ignored label.
        columns.append((wide == wide.flatten().mode().values).sum(1).double())
    table = torch.stack(columns, 1).cpu().numpy()
    spread = np.ptp(table, axis=0)
    return (table - table.min(0)) / np.where(spread > 0, spread, 1)


def replaced(run: Run, source: Sequence[int], outliers: Sequence[int] = (), negated: Sequence[int] = ()) -> Run:
    """Return the run with row source[i]'s inputs in row i; `outliers` are scaled."""
    leaves = list(run.leaves)
    for i, dim in enumerate(run.dims):
        if dim is not None:
            leaves[i] = rows_of(leaves[i], dim, source)
            if leaves[i].is_floating_point():
                for rows, factor in ((outliers, OUTLIER), (negated, -1)):
                    if rows:
                        leaves[i].movedim(dim, 0)[list(rows)] *= factor
    return replace(run, leaves=tuple(leaves))


def replaced_targets(loss: Loss, source: Sequence[int]) -> Loss:
    """Return the loss with row source[i]'s targets in row i."""
    return replace(loss, targets=tuple(rows_of(t, 0, source) for t in loss.targets))


def rows_of(x: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows."""
    return x.detach().index_select(dim, torch.tensor(list(rows), device=x.device)).clone()


def with_other_numbers(run: Run, row: int) -> Run:
    """Return the run with other numbers in a row, or ids that occur in it."""
    leaves = [x if dim is None else _other_numbers(x, dim, row) for x, dim in zip(run.leaves, run.dims, strict=True)]
    return replace(run, leaves=tuple(leaves))


def _other_numbers(x: Tensor, dim: int, row: int) -> Tensor:
    x = x.detach().clone()
    mine = x.movedim(dim, 0)[row]
    mine.copy_(mine / 2 if x.is_floating_point() or x.is_complex() else mine[..., :1].clone() if mine.dim() else mine)
    return x


def has_numbers(run: Run) -> bool:
    """Return True if samples hold floating-point numbers."""
    return any(dim is not None and x.is_floating_point() for x, dim in zip(run.leaves, run.dims, strict=True))
