"""A lower bound on the cost of clipping and noise beyond ordinary training, at the machine's speed.

It holds for every implementation that takes norms by Gram matrices or of instantiated gradients: for each layer the
cheaper of the two, in the necessary FLOPs and bytes, at the speed of a large matrix product and of a copy on this
machine. Samples B, positions T, inputs D, outputs P of a layer:

- Gram matrices: B T^2 (D + P + 2) FLOPs, as symmetry saves half; activation and output gradient are read once more.
- Instantiated: they also give the batch's gradient, so their product costs nothing more; 4 B D P FLOPs for norm and
  weighted sum, and they are written once and read twice.
- Embeddings and normalisation layers: the output gradient is read once more; of the latter the input as well.
- Noise: the gradient of every parameter is read and written once more.

The drawing of the noise, and all work of Python, lie above the floor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.applications.benchmark import Subject
from dpshard.applications.benchmark.timing import synchronize


@dataclass(frozen=True, slots=True)
class Machine:
    """The best speeds of this machine."""

    flops: float
    """Floating-point operations a second, in a matrix product."""
    bandwidth: float
    """Bytes a second, read and written, in a copy."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least cost of clipping and noise, beyond an ordinary step."""

    flops: int
    nbytes: int
    seconds: float


def machine(device: str, dtype: torch.dtype) -> Machine:
    """Measure the speed of a matrix product of 1024^3 and of a copy of 64 MiB, the best of five."""
    n = 1024
    a, b = (torch.randn(n, n).to(device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(64 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Machine(2 * n**3 / _best(lambda: a @ b), 2 * len(source) / _best(lambda: target.copy_(source)))


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def floor_of(subject: Subject, rows: int, speed: Machine) -> Floor:
    """Return the floor of a step on `rows` samples."""
    costs: list[tuple[float, float]] = []
    handles = [
        module.register_forward_hook(lambda m, args, output: costs.append(_cheapest(m, args[0], output, rows, speed)))
        for module in subject.model.modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
    ]
    with torch.no_grad():
        subject.loss(subject.x[:rows], subject.y[:rows])
    for handle in handles:
        handle.remove()
    costs.append((0, sum(2 * p.numel() * p.element_size() for p in subject.model.parameters())))
    flops, nbytes = (int(sum(column)) for column in zip(*costs, strict=True))
    return Floor(flops, nbytes, flops / speed.flops + nbytes / speed.bandwidth)


def _cheapest(module: nn.Module, x: Tensor, output: Tensor, B: int, speed: Machine) -> tuple[float, float]:
    size = output.element_size()
    gradient = output.numel() * size
    if isinstance(module, nn.Embedding):
        return 2 * output.numel(), gradient
    if not isinstance(module, (nn.Linear, nn.Conv2d)):
        return 2 * output.numel(), gradient + x.numel() * size
    P = module.weight.shape[0]
    D, T = math.prod(module.weight.shape[1:]), output.numel() // (B * P)
    ways = [
        (B * T * T * (D + P + 2), gradient + x.numel() * size),
        (4 * B * D * P, 3 * B * D * P * size),
    ]
    return min(ways, key=lambda way: way[0] / speed.flops + way[1] / speed.bandwidth)


def as_figures(floor: Floor, speed: Machine, ordinary_seconds: float) -> dict[str, Any]:
    """Return the floor for a results file, with the least possible ratio of a private to the ordinary step."""
    return {
        "flops": floor.flops,
        "bytes": floor.nbytes,
        "seconds": floor.seconds,
        "ratio": 1 + floor.seconds / ordinary_seconds,
        "machine_flops": speed.flops,
        "machine_bandwidth": speed.bandwidth,
    }
