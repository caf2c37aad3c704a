"""Names of parameters without the prefixes of wrappers: the keys of noise, groups and states.

And walks through modules, faster than nn.Module's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Set

from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPERS = ", ".join(_WRAPPERS)
"""For error messages."""


@functools.lru_cache(maxsize=2**16)
def canonical_name(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return True if torch.compile returned `module`."""
    # Importing torch._dynamo is slow; a wrapper exists only after it.
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def is_compiled(module: nn.Module) -> bool:
    """Return True if calls of `module` run compiled code."""
    return module._compiled_call_impl is not None or is_compiled_wrapper(module)


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return `[*model.named_modules()]`."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((path, module))
        children = module._modules
        if children:
            prefix = f"{path}." if path else ""
            waiting += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return `[*model.named_parameters()]`."""
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()  # torch hashes a tensor by a function in Python
    for path, module in modules_of(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{path}.{name}" if path else name, parameter))
    return found


def has_parameter_with_id(model: nn.Module, ids: Set[int]) -> bool:
    """Return True if a parameter of `model` has one of these ids."""
    return any(not ids.isdisjoint(map(id, module._parameters.values())) for _, module in modules_of(model))
