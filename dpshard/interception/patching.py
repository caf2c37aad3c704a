"""Puts a forward on every module with parameters."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dpshard.errors import UnsupportedParameterError
from dpshard.interception.active import ActiveForward, in_region
from dpshard.interception.compiled import CompiledRegions
from dpshard.interception.module_hooks import has_hooks, with_recomputed_weights
from dpshard.interception.parameters import TrainedParameters
from dpshard.names import is_compiled_wrapper
from dpshard.rules.modes import Passthrough

Enter = Callable[[nn.Module, Any, bool, Any, Any], Any]
"""(module, its own forward, True if compiled, args, kwargs) -> output."""


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {}
"""Forwards of classes, for regions."""


class ModulePatcher:
    """Patches modules to call `enter`."""

    def __init__(
        self, parameters: TrainedParameters, active: ActiveForward, regions: CompiledRegions, enter: Enter
    ) -> None:
        self._parameters, self._active, self._regions, self._enter = parameters, active, regions, enter
        self._codes: dict[tuple[type[nn.Module], types.CodeType], types.CodeType] = {}
        self._patched: list[tuple[nn.Module, str, Any]] = []  # module, attribute, previous value
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """Patch every module with parameters."""
        model = self._parameters.model
        for path, module in model.named_modules():
            if next(module.parameters(), None) is None:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                if any(parameter.requires_grad for parameter in module.parameters()):
                    raise UnsupportedParameterError(
                        f"{path or 'the model'} is compiled by torch.jit.script, so dpshard cannot see its functions. "
                        f"Use the Python module (and torch.compile), or freeze its parameters with "
                        f"requires_grad_(False)."
                    )
                continue
            compiled = module._compiled_call_impl is not None
            if compiled:
                self._patch(module, "_compiled_call_impl", compiled=True)
            if self._parameters.unshards(module):
                self._skip_sharding_hooks(module, compiled=compiled)
            elif not compiled and (module is model or has_hooks(module)):
                self._enter_with_hooks(module)
            self._patch(module, "forward", compiled=is_compiled_wrapper(module))

    def uninstall(self) -> None:
        """Restore the forwards."""
        for module, attribute, previous in reversed(self._patched):
            if previous is None:
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = previous
        self._patched.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward before its patch."""
        previous = next((p for m, attribute, p in self._patched if m is module and attribute == "forward"), None)
        original = previous if previous is not None else types.MethodType(type(module).forward, module)
        if has_hooks(module) and not self._parameters.unshards(module):
            original = module._call_impl
        return self._parameters.repeatable(module, with_recomputed_weights(module, original))

    def _patch(self, module: nn.Module, attribute: str, *, compiled: bool) -> None:
        previous = module.__dict__.get(attribute)
        self._patched.append((module, attribute, previous))
        enter = self._enter
        original = previous if previous is not None else types.MethodType(getattr(type(module), attribute), module)

        def on_copy(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if previous is None:
                return getattr(type(copy), attribute)(copy, *args, **kwargs)
            own = isinstance(previous, types.MethodType)
            return previous.__func__(copy, *args, **kwargs) if own else previous(*args, **kwargs)

        # A deep copy of the module binds the method to the copy, an ordinary module.
        def forward(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module:
                return on_copy(self_module, *args, **kwargs)
            return enter(module, original, compiled, args, kwargs)

        # The same, but the trace of a region reads no closure, on which dynamo would set guards.
        def plain_in_regions(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and in_region.on:
                return _FORWARDS[type(self_module)](self_module, *args, **kwargs)
            if self_module is not module:
                return on_copy(self_module, *args, **kwargs)
            return enter(module, original, compiled, args, kwargs)

        if previous is None and attribute == "forward" and not compiled:
            _FORWARDS[type(module)] = type(module).forward
            forward = plain_in_regions
        forward.__code__ = self._code_for(type(module), forward.__code__)
        if attribute == "forward":
            functools.update_wrapper(forward, getattr(type(module), "forward"), updated=())  # noqa: B009
        module.__dict__[attribute] = types.MethodType(forward, module)

    def _code_for(self, kind: type[nn.Module], code: types.CodeType) -> types.CodeType:
        """Return a copy of `code` for one class.

        Dynamo compiles a code object only a few times; a copy per module would compile equal blocks one by one.
        """
        if (kind, code) not in self._codes:
            self._codes[kind, code] = code.replace(co_name=f"{kind.__name__}_{code.co_name}")
        return self._codes[kind, code]

    def _enter_with_hooks(self, module: nn.Module) -> None:
        self._patched.append((module, "_compiled_call_impl", None))

        def call(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module or self._active.running or not has_hooks(module):
                return self_module._call_impl(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:  # in backward
                return self_module._call_impl(*args, **kwargs)
            return self._enter(module, module._call_impl, False, args, kwargs)

        module.__dict__["_compiled_call_impl"] = types.MethodType(call, module)

    def _skip_sharding_hooks(self, module: nn.Module, *, compiled: bool) -> None:
        active = self._active
        previous = module.__dict__.get("_compiled_call_impl")
        original = previous if previous is not None else module._call_impl
        self._patched.append((module, "_compiled_call_impl", previous))

        def call(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module:
                return self_module._call_impl(*args, **kwargs)
            with Passthrough.set(active.running):
                return original(*args, **kwargs)

        module.__dict__["_compiled_call_impl"] = types.MethodType(call, module)

        looking: list[ExitStack] = []

        @torch.compiler.disable
        def gathered(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._parameters.take_up(module)
            looking.append(ExitStack())
            looking[-1].enter_context(Passthrough.set(False))
            if compiled and active.running and active.mode is not None:
                looking[-1].enter_context(self._regions.slots_for(module, module.forward, args, kwargs))

        @torch.compiler.disable
        def done(*_: Any) -> None:
            if looking:
                looking.pop().close()

        # Parameters are gathered, and not yet freed.
        self._hooks.append(module.register_forward_pre_hook(cast(Any, gathered), with_kwargs=True))
        self._hooks.append(module.register_forward_hook(cast(Any, done), prepend=True, always_call=True))
