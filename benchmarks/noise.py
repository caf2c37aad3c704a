"""The cost of every kind of noise: the whole release of a sum, with its norm and its division."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from dpshard.applications.benchmark import interleave
from dpshard.noise.keyed import KeyedDiscreteGaussian, KeyedGaussian, SumShard

ELEMENTS = 2**24

KINDS: dict[str, KeyedGaussian] = {
    "default": KeyedGaussian(bytes(32)),
    "secure_mode=True": KeyedGaussian(bytes(32), secure=True),
    'noise="discrete-gaussian"': KeyedDiscreteGaussian(bytes(32)),
}


def measure(elements: int = ELEMENTS, *, rounds: int = 5) -> list[dict[str, Any]]:
    """Return nanoseconds per element of a release, by one thread and by all, for float32 and float64 sums."""
    threads, found = torch.get_num_threads(), []
    try:
        for n in dict.fromkeys((1, threads)):
            torch.set_num_threads(n)
            for kind, noise in KINDS.items():
                for dtype in (torch.float32, torch.float64):
                    ns = _nanoseconds(noise, dtype, elements, rounds)
                    found.append({"kind": kind, "dtype": str(dtype)[6:], "threads": n, "ns": ns})
    finally:
        torch.set_num_threads(threads)
    return found


def _nanoseconds(noise: KeyedGaussian, dtype: torch.dtype, elements: int, rounds: int) -> float:
    shards = [SumShard("w", torch.zeros(elements, dtype=dtype))]
    release = partial(noise.release_, shards, step=0, std=1.0, divisor=2.0)
    times = interleave({"release": release}, rounds=rounds, warmup=1)  # the first one allocates memory
    return 1e9 * median(times["release"]) / elements
