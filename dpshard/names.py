"""Names of parameters without the prefixes of wrappers: the keys of noise, groups and states.

And walks through modules, faster than nn.Module's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Set
from itertools import chain
from operator import attrgetter, is_
from typing import Any

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


class KeptWalk:
    """The modules and parameters of a model, as of the latest `renew`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules: list[nn.Module] = []
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._owners: list[dict[str, Any]] = []
        self._facts: tuple[list[int], list[str]] | None = None
        self._held: list[Any] = []

    def renew(self) -> bool:
        """Walk if a module or parameter was added, removed or replaced; return True then."""
        if self._facts is not None and self._facts == self._now():
            held = self._look()
            if len(held) == len(self._held) and all(map(is_, held, self._held)):
                return False
        self.modules = [module for _, module in modules_of(self._model)]
        self.parameters = parameters_of(self._model)
        self._owners = [*map(_MODULES, self.modules), *map(_PARAMETERS, self.modules)]
        self._facts = None
        if all(isinstance(owner, dict) for owner in self._owners):  # not of scripted modules
            self._facts, self._held = self._now(), self._look()
        return True

    def _now(self) -> tuple[list[int], list[str]]:
        """Return the sizes and keys of what modules hold."""
        return [*map(len, self._owners)], [*chain.from_iterable(self._owners)]

    def _look(self) -> list[Any]:
        """Return the modules and parameters, and the dicts that hold them, which FSDP may replace."""
        own = map(_MODULES, self.modules), map(_PARAMETERS, self.modules)
        return [*chain.from_iterable(own), *chain.from_iterable(map(dict.values, self._owners))]


_MODULES, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")


def has_parameter_with_id(model: nn.Module, ids: Set[int]) -> bool:
    """Return True if a parameter of `model` has one of these ids."""
    return any(not ids.isdisjoint(map(id, module._parameters.values())) for _, module in modules_of(model))
