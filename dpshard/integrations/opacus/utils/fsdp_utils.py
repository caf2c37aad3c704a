"""Opacus's wrapper for FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def FSDP2Wrapper(
    model: nn.Module,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    opacus_high_precision_layers: type[nn.Module] | tuple[type[nn.Module], ...] = (),
) -> Any:
    """Shard each layer of `model`, then the rest, by `fully_shard`; return the same model.

    `opacus_high_precision_layers` keep the default dtype.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    precise = MixedPrecisionPolicy(param_dtype=torch.get_default_dtype())
    for layer in list(_layers(model)):
        if layer is not model:
            fully_shard(layer, mp_policy=precise if isinstance(layer, opacus_high_precision_layers) else policy)
    return fully_shard(model, mp_policy=policy)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers to shard. Attention reads the parameters of its sub-modules, so it stays whole."""
    if any(True for _ in module.parameters(recurse=False)):
        yield module
    if not isinstance(module, nn.MultiheadAttention):
        for child in module.children():
            yield from _layers(child)
