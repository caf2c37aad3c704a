"""ZeRO-3 and recorded forwards.

[Note: Living with gathered parameters] Hooks of DeepSpeed gather a module's parameters before its forward and backward,
and free them after each. So
- the function mode must not take the hooks' torch functions on parameters for the model's;
- the hooks must mark no parameter, and no tensor derived only from parameters: sources are found by identity;
- autograd would keep every gathered parameter until backward, so it saves a reference, and backward gathers it again;
- passes of the start-up must change neither the module order that DeepSpeed learns, nor its counts;
- derivations (`w.t()`) may be replayed while their roots are partitioned: then a stand-in has their shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.errors import UnsupportedParameterError
from dpshard.rules.modes import Passthrough

_AROUND = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
"""Functions that DeepSpeed's hooks call around a module."""


def is_gathered(parameter: Any) -> bool:
    """Return True if this rank has the whole parameter now."""
    return parameter.ds_status.name == "AVAILABLE"


class Zero3:
    """Adapts ZeRO-3 to recorded forwards; see [Note: Living with gathered parameters]."""

    def __init__(self, core: nn.Module, offload: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.core, self.offload, self.parameters = core, offload, parameters
        self.values: Mapping[str, Tensor] = _Values(parameters)
        self._at: dict[int, Any] = {}  # by memory address
        self._gathered_here: list[Any] = []
        self._saving: list[torch.autograd.graph.saved_tensors_hooks] = []
        for name in _AROUND:
            setattr(offload, name, self._quietly(getattr(offload, name)))
        # A parameter that a module borrows is gathered at its lookup, within the forward.
        self._gathering = [(p, p.all_gather) for p in core.parameters()]  # type: ignore[attr-defined]
        for p, all_gather in self._gathering:
            p.all_gather = _in_quiet(all_gather)  # type: ignore[attr-defined]
        self.marking = True
        """True if a backward will follow."""
        self._marks = [
            (module, name, vars(module)[name])
            for module in core.modules()
            for name in ("pre_bwd_fn", "post_bwd_fn")
            if name in vars(module)
        ]
        for module, name, function in self._marks:
            setattr(module, name, _Mark(self, function))
        self._handles = [
            core.register_forward_pre_hook(self._begin_saving),
            core.register_forward_hook(self._end_saving, always_call=True),
        ]

    def detach(self) -> None:
        """Restore DeepSpeed."""
        for name in _AROUND:
            vars(self.offload).pop(name, None)
        for p, all_gather in self._gathering:
            p.all_gather = all_gather  # type: ignore[attr-defined]
        for module, name, function in self._marks:
            setattr(module, name, function)
        for handle in self._handles:
            handle.remove()

    def _quietly(self, around: Callable[[Any], object]) -> Callable[[Any], None]:
        @functools.wraps(around)
        def quiet(module: Any) -> None:
            with Passthrough.set(True):
                around(module)
                for parameter in module.parameters(recurse=False):
                    self._note(parameter)

        return quiet

    # --- what autograd saves

    def _note(self, parameter: Any) -> None:
        """Record a gathered parameter's address; one that is never freed may be saved itself."""
        self._at = {address: p for address, p in self._at.items() if p is not parameter}
        if is_gathered(parameter) and not parameter.ds_persist and parameter.numel():
            self._at[parameter.data_ptr()] = parameter

    def _begin_saving(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._saving.append(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            self._saving[-1].__enter__()

    def _end_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saving:
            self._saving.pop().__exit__()

    def _pack(self, x: Tensor) -> Any:
        with Passthrough.set(True):
            if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or not x.numel():
                return x
            begin = x.data_ptr()
            for address, p in self._at.items():
                if address <= begin < address + p.numel() * p.element_size() and x.dtype == p.dtype:
                    return _Lent(p, x.size(), x.stride(), (begin - address) // p.element_size())
            return x

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Lent):
            return saved
        with Passthrough.set(True):
            p = saved.parameter
            if not is_gathered(p):
                raise UnsupportedParameterError(
                    f"Backward needs a parameter of shape {tuple(p.ds_shape)} that ZeRO-3 has not gathered: a module "
                    f"uses a parameter that another module owns. Call "
                    f"deepspeed.zero.register_external_parameter(module, parameter)."
                )
            return p.data.as_strided(saved.size, saved.stride, p.data.storage_offset() + saved.offset)

    # --- start-up

    def unshard(self) -> None:
        """Gather the outermost module's parameters until `isolated` ends."""
        with Passthrough.set(True):
            for parameter in self.core.parameters(recurse=False):
                if not is_gathered(parameter):
                    parameter.all_gather()  # type: ignore[attr-defined]
                    self._gathered_here.append(parameter)

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Return a context without backward."""
        self.marking = False
        try:
            yield
        finally:
            self.marking = True

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Return a context for forwards and backwards outside training; it restores DeepSpeed."""
        awaited = {module: vars(module).get("applied_pre_backward_ref_cnt", 0) for module in self.core.modules()}
        saving, self._saving = self._saving, []
        for hooks in saving:
            hooks.__exit__()  # torch.func, which rules use, refuses to run under them
        try:
            yield
        finally:
            self._saving = saving
            for hooks in saving:
                hooks.__enter__()
            for module, count in awaited.items():
                if "applied_pre_backward_ref_cnt" in vars(module):
                    module.applied_pre_backward_ref_cnt = count
            coordinator = self.offload.get_param_coordinator()
            with Passthrough.set(True), torch.no_grad():
                if not coordinator.is_invalid_trace():
                    coordinator._invalidate_trace()  # the next forward learns it anew
                coordinator.release_backward_leftovers()
                while self._gathered_here:
                    self._gathered_here.pop().partition()


def _in_quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with Passthrough.set(True):
            return function(*args, **kwargs)

    return quiet


@dataclass(frozen=True, slots=True)
class _Mark:
    """Marks tensors that backward reaches."""

    owner: Zero3
    function: Any

    def apply(self, x: Tensor) -> Tensor:
        """See torch.autograd.Function."""
        reached = x.requires_grad and not isinstance(x, nn.Parameter)
        return self.function.apply(x) if self.owner.marking and reached else x


@dataclass(frozen=True, slots=True)
class _Lent:
    """A saved view of a gathered parameter."""

    parameter: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Values(Mapping[str, Tensor]):
    """Whole parameters; NaN in place of a partitioned one."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if is_gathered(parameter):
            return parameter
        # A replayed derivation only moves elements; NaN would show if values mattered.
        return torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
