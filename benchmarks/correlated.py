"""Correlated noise: its time by the number of vectors."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from dpshard import BandMF
from dpshard.noise.buffers import BufferedGaussian, NoiseBuffers
from dpshard.noise.keyed import CorrelatedGaussian, NoiseTerm, SumShard

VECTORS = (1, 2, 4, 8, 16, 64)
ELEMENTS = 2**22


def seconds(elements: int = ELEMENTS, *, rounds: int = 3) -> list[dict[str, Any]]:
    """Return nanoseconds of CPU time per element of a release with p vectors, float32, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shards, found = [SumShard("w", torch.zeros(elements))], []
        for p in VECTORS:
            terms = tuple(NoiseTerm(1.0 / (j + 1), bytes([j] * 32), j) for j in range(p))
            release = partial(CorrelatedGaussian(bytes(32), terms=terms).release_, shards)
            times = []
            for _ in range(rounds):
                start = time.process_time()
                release(step=0, std=1.0, divisor=2.0)
                times.append(time.process_time() - start)
            found.append({"vectors": p, "ns": 1e9 * min(times) / elements})
    finally:
        torch.set_num_threads(threads)
    return found


def of_buffers(elements: int = ELEMENTS, *, bands: tuple[int, ...] = (4, 16, 32), rounds: int = 5) -> list[Any]:
    """Return nanoseconds of CPU time per element of a release from b - 1 buffers, float32, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shards, found = [SumShard("w", torch.zeros(elements))], []
        for b in bands:
            buffers = NoiseBuffers(BandMF(bands=b).strategy(2 * b)[:b].tolist())
            links = tuple(bytes([step] * 32) for step in range(b + rounds))
            buffers.of_step(shards, links[:b], secure=False)  # from here on all bands count
            times = []
            for step in range(b, b + rounds):
                start = time.process_time()
                noise = BufferedGaussian(links[step], links=links[: step + 1], buffers=buffers)
                noise.release_(shards, step=step, std=1.0, divisor=2.0)
                times.append(time.process_time() - start)
            found.append({"bands": b, "ns": 1e9 * min(times) / elements})
    finally:
        torch.set_num_threads(threads)
    return found
