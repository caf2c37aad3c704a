"""Weights that a hook computes before forward: the old weight_norm and spectral_norm, and pruning.

Of the outermost module these hooks run before its forward is entered, so what they derive from parameters is not
seen. They run once more within.
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
    """`forward` of `module`, after what its hooks compute from parameters alone was computed again."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _KNOWN)]
    if not hooks:
        return forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            if isinstance(hook, SpectralNorm):  # without another step of its power iteration
                setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
            else:
                hook(module, args)
        return forward(*args, **kwargs)

    return recomputed


_KNOWN = (WeightNorm, SpectralNorm, BasePruningMethod)
