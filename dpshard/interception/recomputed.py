"""Weights that a hook computes before forward: old weight_norm and spectral_norm, and pruning.

The outermost module's hooks run outside the mode, so they run again within.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Forward = Callable[..., Any]


def with_recomputed_weights(module: nn.Module, forward: Forward) -> Forward:
    """Return `forward`, preceded by these hooks."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _KNOWN)]
    if not hooks:
        return forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            if isinstance(hook, SpectralNorm):  # without another power iteration
                setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
            else:
                hook(module, args)
        return forward(*args, **kwargs)

    return recomputed


_KNOWN = (WeightNorm, SpectralNorm, BasePruningMethod)
