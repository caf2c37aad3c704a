"""What noise of every kind costs: the whole release of a sum, its norm and its division included."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from dpshard.noise import KeyedDiscreteGaussian, KeyedGaussian, Shard

ELEMENTS = 2**22

KINDS: dict[str, KeyedGaussian] = {
    "default": KeyedGaussian(bytes(32)),
    "secure_mode=True": KeyedGaussian(bytes(32), secure=True),
    'noise="discrete-gaussian"': KeyedDiscreteGaussian(bytes(32)),
}


def measure(elements: int = ELEMENTS, *, rounds: int = 5) -> list[dict[str, Any]]:
    """Nanoseconds an element of a release by one thread and by all of torch's, for sums of float32 and of float64."""
    threads = torch.get_num_threads()
    try:
        return [
            {"kind": kind, "dtype": str(dtype)[6:], "threads": n, "ns": _nanoseconds(noise, dtype, elements, rounds)}
            for kind, noise in KINDS.items()
            for dtype in (torch.float32, torch.float64)
            for n in dict.fromkeys((1, threads))
            if torch.set_num_threads(n) is None
        ]
    finally:
        torch.set_num_threads(threads)


def _nanoseconds(noise: KeyedGaussian, dtype: torch.dtype, elements: int, rounds: int) -> float:
    shard, times = Shard("w", torch.zeros(elements, dtype=dtype)), []
    for step in range(rounds + 1):
        begun = time.perf_counter()
        noise.release_([shard], step=step, std=1.0, divisor=2.0)
        times.append(time.perf_counter() - begun)
    return 1e9 * median(times[1:]) / elements  # the first one makes memory
