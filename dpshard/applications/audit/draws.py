"""Tests that batches are independent draws."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpshard.applications.audit.noise import Finding


def draw_findings(drawn: list[NDArray[np.bool_]], q: float) -> list[Finding]:
    """Test that the draws, [T, n] of each engine, are independent coins of probability `q`."""
    n = drawn[0].shape[1]
    if q == 1:
        return [Finding("samples are not in every batch", 0.0 if all(d.all() for d in drawn) else -math.inf)]
    everyone = np.concatenate(drawn)
    agree = q * q + (1 - q) ** 2
    found = [_count("samples are drawn too often or too rarely", everyone, q)]
    for sample in range(n):
        p = _count("", everyone[:, sample], q).log_p + math.log(n)
        found.append(Finding(f"sample {sample} is drawn too often or too rarely", min(0.0, p)))
    for apart in (1, 2, 3, 4):
        pairs = [d[t] == d[t + apart] for d in drawn for t in range(len(d) - apart) if (t // apart) % 2 == 0]
        if pairs:
            found.append(_count(f"a draw depends on the draw {apart} steps before", np.array(pairs), agree))
    if n > 1:
        half = n // 2
        together = everyone[:, :half] == everyone[:, half : 2 * half]
        found.append(_count("draws of samples depend on each other", together, agree))
        size = round(q * n)
        exactly = everyone.sum(1) == size
        found.append(_count("batches have the same size too often", exactly, float(stats.binom.pmf(size, n, q))))
    epoch = round(1 / q)
    epochs = [d[t : t + epoch].sum(0) == 1 for d in drawn for t in range(0, len(d) - epoch + 1, epoch)]
    if epochs:
        once = float(stats.binom.pmf(1, epoch, q))
        found.append(_count("samples come once in every epoch", np.array(epochs), once))
    if len(drawn) == 2:
        short = min(map(len, drawn))
        found.append(_count("two engines draw the same", drawn[0][:short] == drawn[1][:short], agree))
    return found


def _count(what: str, coins: NDArray[np.bool_], p: float) -> Finding:
    heads, tosses = int(coins.sum()), coins.size
    tails = stats.binom.logcdf(heads, tosses, p), stats.binom.logsf(heads - 1, tosses, p)
    return Finding(what, min(0.0, math.log(2) + float(min(tails))))
