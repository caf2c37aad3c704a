from __future__ import annotations

import torch
from torch import Tensor

from dpshard.noise.keyed import KeyedGaussian


def sampled(
    noise: KeyedGaussian,
    step: int,
    name: str,
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return standard normals [stop - start] of elements [start, stop) of parameter `name` at `step`."""
    zeros = torch.zeros(stop - start, dtype=dtype, device=device)
    return noise.add_(zeros, step=step, name=name, std=1.0, start=start)
