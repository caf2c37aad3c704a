"""Privatizes gradients before any optimizer steps, by one hook for the process."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dpshard.errors import (
    ConfigurationError,
    EngineInUseError,
    LogicalBatchError,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
)
from dpshard.names import has_parameter_with_id, parameters_of
from dpshard.step.internals import Internals


class _Engine(Protocol):
    model: nn.Module

    @property
    def internals(self) -> Internals: ...

    def privatize(self) -> None: ...


# A model keeps its engine alive through its patched forwards.
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False

_NOT_COMPILED = (
    "dpshard adds the noise in a hook before optimizer.step(), which cannot be compiled: compile the step without "
    "fullgraph=True, or not at all"
)


def register(engine: _Engine) -> None:
    """Privatize the gradients of `engine` before every optimizer step from now on."""
    global _installed
    if not _installed:
        # Not at import: it loads the compiler.
        register_optimizer_step_pre_hook(cast(Any, torch.compiler.disable(_before_step, reason=_NOT_COMPILED)))
        _installed = True
    _engines.add(engine)


def unregister(engine: _Engine) -> None:
    """Stop privatizing for `engine`."""
    _engines.discard(engine)


def require_model(model: Any) -> None:
    """Raise ConfigurationError unless `model` is a module, EngineInUseError if an engine has its parameters."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model is of type {type(model).__name__}, not a torch.nn.Module. Pass the module to train. "
            f"(replace_unsupported(model) changes the model in place, and returns only the changes.)"
        )
    for engine in list(_engines):
        owned = engine.internals.owned()
        for name, parameter in model.named_parameters():
            if parameter in owned:
                raise EngineInUseError(
                    f"{name} already belongs to a PrivacyEngine. Two engines would add noise twice, and each would "
                    f"count only a part of the releases. Call engine.detach() on the first, or resume it with "
                    f"load_state_dict()."
                )


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    _refuse_late_parameters(held)
    engines = [engine for engine in list(_engines) if not held.isdisjoint(engine.internals.owned())]
    if not engines:
        return None
    if torch._C._current_graph_task_id() != -1:
        raise LogicalBatchError(
            "optimizer.step() was called within backward(), before all clipped sums have arrived, so some would be "
            "used without noise. Call step() after backward() has returned."
        )
    _refuse_scaler()
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS evaluates the loss several times per step: each evaluation would be another release. "
            "Choose a first-order optimizer (SGD, Adam, ...)."
        )
    # torch passes the unbound step()'s arguments: the optimizer comes first.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    value = None
    if callable(closure):
        evaluate: Any = closure
        for engine in engines:
            evaluate = functools.partial(engine.internals.evaluate, evaluate)
        with torch.enable_grad():
            value = evaluate()
    for engine in engines:
        engine.privatize()
        engine.internals.install_gradients(held)
    _refuse_raw_gradients(held, engines)
    if callable(closure):
        once = _Once(value, held)
        return ((args[0], once, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": once})
    return None


class _Once:
    """A closure whose gradients are private, and must not be recomputed."""

    def __init__(self, value: Any, held: set[Tensor]) -> None:
        self.value = value
        self.called = False
        self._at = {p: _version(p) for p in held}

    def __call__(self) -> Any:
        """Return the value once, if parameters and gradients are unchanged."""
        if self.called:
            raise UnsupportedOptimizerError(
                f"The optimizer evaluates its closure more than once per step: each evaluation would be another "
                f"release. Choose an optimizer that evaluates it once. {_TWO_STEPS}"
            )
        if any(_version(p) != then for p, then in self._at.items()):
            raise UnsupportedOptimizerError(
                f"The optimizer has moved parameters, or cleared gradients, before it evaluates its closure, as SAM "
                f"does: the gradient there would be another release. {_TWO_STEPS}"
            )
        self.called = True
        return self.value


_TWO_STEPS = "Or call optimizer.step() without a closure after each backward(): each of them counts as a release."


def _version(p: Tensor) -> tuple[int, int, int]:
    return (p._version, id(p.grad), -1 if p.grad is None else p.grad._version)


def _refuse_raw_gradients(held: set[Tensor], engines: list[Any]) -> None:
    private = set().union(*(engine.internals.owned() for engine in engines))
    others = [p for p in held - private if p.grad is not None]
    if others:
        raise UnsupportedParameterError(
            f"The optimizer also holds {len(others)} parameter(s) outside of the private model (shape "
            f"{tuple(others[0].shape)}) with gradients that are neither clipped nor noised. Add them to the model "
            f"before making the engine, or give them a separate optimizer if no data reaches them."
        )


def _refuse_late_parameters(held: set[Tensor]) -> None:
    for engine in list(_engines):
        late = {id(p) for p in held - engine.internals.owned() if p.grad is not None}
        if not late or not has_parameter_with_id(engine.model, late):
            continue
        for name, parameter in parameters_of(engine.model):
            if id(parameter) in late:
                raise UnsupportedParameterError(
                    f"{name} has a gradient, but it was frozen, or another parameter, when the engine was made. So the "
                    f"gradient is neither clipped nor noised. Unfreeze, replace and add parameters before making the "
                    f"engine. If the gradient is older than the engine, call zero_grad()."
                )


def _refuse_scaler() -> None:
    # GradScaler leaves no trace on most optimizers, so look for it on the stack.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _SCALER_STEP and frame.f_locals["self"].is_enabled():
            raise UnsupportedOptimizerError(
                "GradScaler scales the loss before per-sample gradients are clipped, and unscales the clipped sum. So "
                "the update is not the accounted one, and norms overflow in fp16 (Bu et al. 2023, arXiv:2311.11822, "
                "Sec. 3.4). Drop the scaler: private training needs no loss scaling. Use bfloat16, or float16 without "
                "a scaler."
            )
        frame = frame.f_back


_SCALER_STEP = torch.amp.GradScaler.step.__code__
