"""Correlated noise of a sharded update: its covariance over steps, the same bits on any ranks, and its memory (14, 15).

The run secret is fixed, so the tests pass or fail for good; under a random one a correct engine would fail each with
probability FALSE_ALARM.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import solve_triangular, toeplitz
from torch import Tensor

from dpshard import BandedInverse
from dpshard.noise.keyed import BLOCK
from tests.distributed.correlated_worker import (
    BANDS,
    BATCH_SIZE,
    RUNS,
    SAMPLES,
    SIGMA,
    STEPS,
    THRESHOLD,
    noises_of_run,
)
from tests.distributed.launch import launch
from tests.distributed.noise_worker import Model
from tests.noise.test_correlation import sensitivity

FALSE_ALARM = 1e-7


def whole(ranks: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    """The noise of whole parameters [steps, elements]; replicas must be equal."""
    found = {}
    for name in ranks[0]:
        parts: dict[int, Tensor] = {}
        for rank in ranks:
            start, rows = rank[name]
            if rows.shape[1]:
                assert torch.equal(parts.setdefault(start, rows), rows), f"replicas of {name} differ"
        found[name] = torch.cat([parts[start] for start in sorted(parts)], 1)
    return found


def require_covariance(rows: np.ndarray, noising: np.ndarray) -> None:
    """Hold the covariance over steps of `rows` [T, n], in standard deviations of z, against that of W z."""
    T, n = rows.shape
    z = solve_triangular(np.tril(toeplitz(noising)), rows, lower=True)  # independent and standard, if it is right
    lo, hi = stats.chi2.ppf([FALSE_ALARM / T / 2, 1 - FALSE_ALARM / T / 2], n)
    assert all(lo <= square <= hi for square in (z**2).sum(1))
    products = (z @ z.T)[np.triu_indices(T, 1)] / math.sqrt(n)  # nearly normal: n is large
    assert np.abs(products).max() < stats.norm.isf(FALSE_ALARM / len(products) / 2)


Noises = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def alone() -> Noises:
    """By run and parameter."""
    found = {}
    for run in RUNS:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="No gradient reached idle"):
            found[run] = noises_of_run(Model(), run)[1]
    return found


def scaled(noise: Noises, run: str) -> np.ndarray:
    correlation = RUNS[run]["noise_correlation"]
    separation = STEPS if run == "buffered" else SAMPLES // BATCH_SIZE
    std = SIGMA * THRESHOLD * sensitivity(correlation.strategy(STEPS), separation=separation)
    return torch.cat(list(noise[run].values()), 1).double().numpy() * BATCH_SIZE / std


@pytest.mark.parametrize("run", RUNS)
def test_the_update_has_the_covariance_of_the_noise(run: str, alone: Noises) -> None:
    require_covariance(scaled(alone, run), RUNS[run]["noise_correlation"].noising(STEPS))


@pytest.mark.parametrize("fault", ["one weight is dropped", "a vector under another key", "another number of bands"])
def test_the_covariance_shows(fault: str, alone: Noises) -> None:
    rows, w = scaled(alone, "banded-inverse"), BandedInverse(bands=BANDS).noising(STEPS)
    z = solve_triangular(np.tril(toeplitz(w)), rows, lower=True)
    if fault == "one weight is dropped":
        rows = rows - w[3] * np.concatenate([np.zeros_like(z[:3]), z[:-3]])
    elif fault == "a vector under another key":
        rows[5] += w[1] * (np.random.default_rng(0).standard_normal(z.shape[1]) - z[4])
    else:
        w = BandedInverse(bands=BANDS + 1).noising(STEPS)
    with pytest.raises(AssertionError):
        require_covariance(rows, w)


@pytest.mark.parametrize(("backend", "world_size"), [("fsdp2", 2), ("ddp", 2), ("hsdp", 4)])
def test_shards_have_the_noise_of_one_process(tmp_path: Path, backend: str, world_size: int, alone: Noises) -> None:
    """Bit for bit, where sums are equal: so with the same covariance, and independent across shards."""
    launch("correlated_worker.py", world_size, "noise", backend, str(tmp_path))
    for run, expected in alone.items():
        found = whole([torch.load(tmp_path / run / f"{rank}.pt") for rank in range(world_size)])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.exhaustive
def test_16_vectors_need_no_more_memory_than_one() -> None:
    """On 2 ranks of FSDP2: one buffer of a block, whatever the number of vectors; they would take 16 shards."""
    plain, correlated = launch("correlated_worker.py", 2, "memory")[0]
    assert (plain["vectors"], correlated["vectors"]) == (1, 16)
    assert correlated["peak"] <= plain["peak"] + 5 * BLOCK  # bytes: BLOCK floats, and some Python objects
    assert 16 * correlated["shard"] > 50 * BLOCK
