"""Poisson-sized batches of a fixed number of rows, for contenders without a sampler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpshard.applications.benchmark import Batch
from dpshard.applications.benchmark.training import expected_batch


class PoissonFeed:
    """Draws every row of a data set with the same probability; at most B rows, filled up to B with padding.

    NumPy's generator draws them, which suffices for timing.
    """

    def __init__(self, x: Tensor, y: Tensor, rows: int) -> None:
        self.x, self.y, self.rows = x, y, rows
        self.rate = expected_batch(rows) / len(x)
        self._random = np.random.default_rng(0)

    def draw(self) -> Batch:
        """Return the next batch; its padding repeats a row."""
        total = len(self.x)
        count = min(self.rows, int(self._random.binomial(total, self.rate)))
        index_B = torch.zeros(self.rows, dtype=torch.int64)
        index_B[:count] = torch.from_numpy(self._random.choice(total, count, replace=False))
        is_padding_B = torch.arange(self.rows) >= count
        index_B = index_B.to(self.x.device)
        return Batch(self.x[index_B], self.y[index_B], is_padding_B.to(self.x.device))
