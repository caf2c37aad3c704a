"""Hooks that torch runs in `__call__`, outside `forward`.

A module with hooks of the user is entered at its call; hooks of frameworks stay outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as module_calls

from dpshard.errors import UnsupportedParameterError

_FRAMEWORKS = ("torch", "accelerate", "deepspeed", "dpshard")


def has_hooks(module: nn.Module) -> bool:
    """Return True if the user's hooks run."""
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
