"""The workloads: full fine-tuning from random weights, by SGD without state, on random data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models
from dpshard.config import require_choice
from dpshard.errors import ConfigurationError

POOL = 8
"""Micro-batches in the data set."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model by family and sizes, and the rows of a micro-batch."""

    name: str
    title: str
    family: str
    """gpt, vit, cnn, mlp or llama."""
    batch: int
    """Samples B of a micro-batch."""
    sizes: Mapping[str, Any]
    """Arguments of the model, and of its data where the model takes none (image, length)."""
    tiny: Mapping[str, Any]
    """Sizes of the version for tests."""

    def build(self) -> nn.Module:
        """Return the model, with the same random weights every time."""
        torch.manual_seed(0)
        sizes = dict(self.sizes)
        if self.family == "gpt":
            return models.GPT(**sizes)
        if self.family == "vit":
            return models.ViT(**sizes)
        if self.family == "llama":
            sizes.pop("length")
            return models.Llama(**sizes)
        if self.family == "cnn":
            sizes.pop("image")
            return models.cnn(**sizes)
        return models.mlp(**sizes)

    def data(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets of `rows` samples, the same every time."""
        g, s = torch.Generator().manual_seed(1), self.sizes
        if self.family in ("gpt", "llama"):
            ids = torch.randint(s["vocabulary"], (rows, s["length"] + 1), generator=g)
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        shape = (s["inputs"],) if self.family == "mlp" else (3, s["image"], s["image"])
        classes = s["outputs"] if self.family == "mlp" else s["classes"]
        return torch.randn(rows, *shape, generator=g), torch.randint(classes, (rows,), generator=g)

    def at_tiny_size(self) -> Workload:
        """Return the same kind of model, for tests."""
        return replace(self, batch=min(self.batch, 5), sizes={**self.sizes, **self.tiny})

    def narrow(self) -> Workload:
        """Return as many layers and samples with tiny sizes, to measure the costs that do not depend on size."""
        depth = {"layers": self.sizes["layers"]} if "layers" in self.sizes else {}
        return replace(self, sizes={**self.sizes, **self.tiny, **depth})

    def resized(self, axis: str, value: int) -> Workload:
        """Return the workload with another size along an axis of AXES. Raises ConfigurationError without that axis."""
        require_choice("axis", axis, list(AXES))
        if value < 1:
            raise ConfigurationError(f"{axis}={value}: a size is at least 1.")
        if axis == "B":
            return replace(self, batch=value)
        name = next((name for name in AXES[axis] if name in self.sizes), None)
        if name is None:
            raise ConfigurationError(f"{self.name} has no {axis}; it has {', '.join(self.sizes)}, and B.")
        return replace(self, sizes={**self.sizes, name: value})


AXES: dict[str, tuple[str, ...]] = {
    "T": ("length", "image"),
    "B": (),
    "width": ("width",),
    "depth": ("layers",),
}
"""Axes of a sweep, and their sizes: T is the length in tokens, or the side of an image in pixels."""


def per_sample_loss(scores: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample [B]: cross-entropy, a mean over its positions."""
    each = F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(len(y), -1).mean(1)


def loss(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean over samples of their losses."""
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


_GPT = {"width": 256, "layers": 6, "heads": 4, "vocabulary": 8192, "length": 128, "tied": False}
_TINY_GPT = {"width": 8, "layers": 2, "heads": 2, "vocabulary": 13, "length": 6}
_VIT = {"width": 192, "layers": 6, "heads": 3, "image": 64, "patch": 8, "classes": 10}
_TINY_VIT = {"width": 8, "layers": 2, "heads": 2, "image": 8, "patch": 4, "hidden": 12}

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(name="W1", title="GPT", family="gpt", batch=8, sizes=_GPT, tiny=_TINY_GPT),
        Workload(name="W2", title="ViT", family="vit", batch=16, sizes=_VIT, tiny=_TINY_VIT),
        Workload(
            name="W3", title="CNN", family="cnn", batch=32, sizes={"width": 32, "classes": 10, "image": 32},
            tiny={"width": 8, "image": 8},
        ),
        Workload(
            name="W4", title="MLP", family="mlp", batch=32, sizes={"inputs": 5120, "width": 2560, "outputs": 1280},
            tiny={"inputs": 10, "width": 7, "outputs": 5},
        ),
        Workload(
            name="W5", title="GPT, tied", family="gpt", batch=8, sizes={**_GPT, "tied": True}, tiny=_TINY_GPT
        ),
    )
}  # fmt: skip
"""On a CPU, in float32. W4 is the synthetic setting of the memory table of Opacus' blog on ghost clipping (2024)."""

_LLAMA = {
    "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocabulary": 128256, "length": 1024,
}  # fmt: skip
_TINY_LLAMA = {"width": 8, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 12, "vocabulary": 13, "length": 6}

GPU_WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            name="G1", title="ViT-G", family="vit", batch=4,
            sizes={
                "width": 1664, "layers": 48, "heads": 16, "image": 140, "patch": 14, "classes": 1000, "hidden": 8192
            },
            tiny=_TINY_VIT,
        ),
        Workload(
            name="G2", title="GPT2-XL", family="gpt", batch=4,
            sizes={"width": 1600, "layers": 48, "heads": 25, "vocabulary": 50257, "length": 100, "tied": True},
            tiny=_TINY_GPT,
        ),
        Workload(name="G3", title="Llama, 1.2B", family="llama", batch=4, sizes=_LLAMA, tiny=_TINY_LLAMA),
        Workload(
            name="G4", title="Llama, 1.2B, long", family="llama", batch=2, sizes={**_LLAMA, "length": 4096},
            tiny=_TINY_LLAMA,
        ),
    )
}  # fmt: skip
"""On GPUs, in bfloat16: the models of Figures 5 and 7 of Bu et al. 2023, arXiv:2311.11822, at B = 4 and T = 100, and
one of the shape of Llama 3.2 1B at T = 1024 and 4096."""


def find(name: str, *, tiny: bool = False) -> Workload:
    """Return a workload by name. Raises ConfigurationError, which lists them, for an unknown name."""
    known = WORKLOADS | GPU_WORKLOADS
    require_choice("workload", name, list(known))
    return known[name].at_tiny_size() if tiny else known[name]
