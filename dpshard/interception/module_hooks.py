"""Hooks that torch runs in `__call__`, outside `forward`.

A module with the user's hooks is intercepted at `__call__`, so that they are recorded. Hooks of frameworks stay
outside. Some hooks of torch compute weights: old weight_norm and spectral_norm, and pruning. Those of the outermost
module run again within the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as module_calls
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpshard.errors import UnsupportedParameterError

Forward = Callable[..., Any]

_FRAMEWORKS = ("torch", "accelerate", "deepspeed", "dpshard")
_WITH_WEIGHTS = (WeightNorm, SpectralNorm, BasePruningMethod)
"""Frameworks' hooks that compute weights."""


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module has hooks of the user."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        module_calls._global_forward_pre_hooks,
        module_calls._global_forward_hooks,
        module_calls._global_backward_pre_hooks,
        module_calls._global_backward_hooks,
    )
    return any(_home(hook) not in _FRAMEWORKS for some in hooks for hook in some.values())


def refuse_hooks(module: nn.Module) -> None:
    """Raise UnsupportedParameterError if `module` has hooks, outside its recorded forward."""
    if has_hooks(module):
        raise UnsupportedParameterError(
            f"{type(module).__name__}, which your loop calls, has a hook that verification does not see. It was "
            f"registered after the engine was made, for all modules, or on a module that FSDP or ZeRO-3 shards. "
            f"Register it before you make the PrivacyEngine, or on a module within, or move its code into forward."
        )


def _home(hook: Callable[..., Any]) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def with_recomputed_weights(module: nn.Module, forward: Forward) -> Forward:
    """Return `forward`, preceded by the hooks that compute weights."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _WITH_WEIGHTS)]
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
