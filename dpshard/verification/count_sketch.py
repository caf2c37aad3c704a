"""Count sketches: gradients in little memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.records import as_real

WIDTHS = (4093, 4091, 4079)
"""The width is the first that does not divide the number of elements. Primes spread matrix columns."""
_ROWS = 256
"""Number of widths of a gradient that are sketched at once, which limits memory."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The norm of a gradient, and a linear image that nearly keeps norms of differences.

    Elements get random signs and are summed in some 4,000 places; smaller gradients are kept whole. The image's squared
    norm is unbiased, with relative standard deviation about sqrt(2 / 4000). Charikar, Chen and Farach-Colton 2002,
    "Finding frequent items in data streams".
    """

    norm: Tensor
    """[], float64, on the CPU"""
    image: Tensor
    """[at most WIDTHS[0]], float64, on the CPU"""

    @classmethod
    def of(cls, gradient: Tensor) -> Sketch:
        """Return the sketch; equal shapes on one device share signs and places."""
        flat = as_real(gradient.detach()).reshape(-1)
        if len(flat) <= WIDTHS[0]:
            flat = flat.to("cpu", torch.float64, copy=True)
            return cls(flat.norm(), flat)
        width = next((width for width in WIDTHS if len(flat) % width), WIDTHS[0])
        signs = torch.Generator(flat.device).manual_seed(0)
        norm_sq, image = (torch.zeros(n, dtype=torch.float64, device=flat.device) for n in (1, width))
        for part in flat.split(_ROWS * width):
            wide = part.to(torch.float64, copy=True)
            norm_sq += wide.square().sum()
            wide *= torch.randint(0, 2, wide.shape, generator=signs, device=wide.device, dtype=torch.int8) * 2 - 1
            image += F.pad(wide, (0, -len(wide) % width)).view(-1, width).sum(0)
        return cls(norm_sq.sqrt()[0].cpu(), image.cpu())
