"""The noise of a sharded update: its deviation, equal on replicas, independent across shards, parameters and steps.

Failure modes: 9 (a layer that never ran); 14 (deviation whatever the world size and the mesh); 15 (shards independent,
replicas equal); 26 (independent of each other).

The run secret is fixed, so the tests pass or fail for good; under a random one a correct engine
would fail each with probability FALSE_ALARM.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.distributed.launch import launch
from tests.distributed.noise_worker import BATCH_SIZE, SIGMA, STEPS, THRESHOLD, Model
from tests.grids import covering

FALSE_ALARM = 1e-7
CHUNK = 1024


def noise_of(tmp_path: Path, backend: str, world_size: int) -> list[dict[str, tuple[int, Tensor]]]:
    launch("noise_worker.py", world_size, backend, str(tmp_path))
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize(
    ("backend", "world_size"),
    covering(
        [("ddp", 2), ("zero1", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)],
        lambda backend, world_size: {backend} & {"ddp", "fsdp2", "hsdp"},
    ),
)
def test_noise_of_a_sharded_update(tmp_path: Path, backend: str, world_size: int) -> None:
    ranks = noise_of(tmp_path, backend, world_size)
    sizes = {name: p.numel() for name, p in Model().named_parameters()}
    pieces: dict[tuple[str, int], Tensor] = {}
    for rank in ranks:
        assert rank.keys() == sizes.keys()
        for name, (start, rows) in rank.items():
            assert torch.equal(pieces.setdefault((name, start), rows), rows), f"replicas of {name} differ"

    # Every element is in exactly one shard.
    for name, size in sizes.items():
        shards = sorted((start, rows.shape[1]) for (n, start), rows in pieces.items() if n == name and rows.shape[1])
        assert shards[0][0] == 0
        assert all(start + length == following for (start, length), (following, _) in pairwise(shards))
        assert sum(shards[-1]) == size

    # SGD(lr=1) subtracts the noise over the expected batch size.
    everything = torch.cat([rows.flatten() for rows in pieces.values()]).double() * BATCH_SIZE / (SIGMA * THRESHOLD)
    assert everything.numel() == STEPS * sum(sizes.values())
    lo, hi = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], everything.numel())
    assert lo <= float(everything.square().sum()) <= hi
    assert stats.kstest(everything.numpy(), "norm").pvalue > FALSE_ALARM

    # The beginnings of all shards of all parameters at all steps, against each other: equal seeds would show here.
    heads = torch.stack([row[:CHUNK] for rows in pieces.values() if rows.shape[1] >= CHUNK for row in rows])
    assert len(heads) >= STEPS * (4 if backend.startswith("fsdp2") else 2)
    correlation = np.corrcoef(heads.double().numpy())
    off = np.abs(correlation[np.triu_indices(len(heads), 1)])
    assert off.max() < stats.norm.isf(FALSE_ALARM / 2 / len(off)) / math.sqrt(CHUNK)
