"""ZeRO-3 around a recorded forward: parameters that DeepSpeed gathers for a module and frees again.

[Note: Living with gathered parameters]
DeepSpeed gathers the parameters of a module in a hook before its forward, frees them in one after it, and does the
same around its backward. Five things are handled here:
- the hooks handle parameters with torch functions, which the function mode must not take for the model's;
- the hooks pass inputs and outputs of modules through autograd functions, which report when backward comes. A
  parameter, or a tensor derived from parameters only (the embedding of positions), must stay the same object, because
  sources are found by identity. So it is not marked, and backward does not reach it;
- autograd would keep every gathered parameter until backward, through the detached parameters of rules. So it saves a
  note, and backward gathers the parameter again;
- start-up runs forwards and backwards within a forward, which must not enter the order of modules that DeepSpeed
  learns, nor its counts of forwards that await their backward;
- derivations (`w.t()`) are replayed where their roots may be partitioned again: then a stand-in has their shape.
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
from dpshard.rules.torch_functions import Passthrough

_AROUND = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
"""What DeepSpeed's hooks call around a module."""


def is_gathered(parameter: Any) -> bool:
    """Return True if this rank has the whole parameter now."""
    return parameter.ds_status.name == "AVAILABLE"


class Zero3:
    """What ZeRO-3 asks of a model whose forwards are recorded."""

    def __init__(self, core: nn.Module, offload: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.core, self.offload, self.parameters = core, offload, parameters
        self.values: Mapping[str, Tensor] = _Values(parameters)
        self._at: dict[int, Any] = {}  # parameters that are gathered now, by the address of their memory
        self._gathered_here: list[Any] = []
        self._saving: list[torch.autograd.graph.saved_tensors_hooks] = []
        for name in _AROUND:
            setattr(offload, name, self._quietly(getattr(offload, name)))
        # DeepSpeed gathers a parameter that a module borrows from another when it is looked up, within the forward.
        self._gathering = [(p, p.all_gather) for p in core.parameters()]  # type: ignore[attr-defined]
        for p, all_gather in self._gathering:
            p.all_gather = _in_quiet(all_gather)  # type: ignore[attr-defined]
        self.marking = True
        """Whether a backward is to come; modules want notice of it."""
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
        """Leave DeepSpeed as it was."""
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

    # --- what autograd saves ----------------------------------------------------------------------------------------

    def _note(self, parameter: Any) -> None:
        """Keep track of where a gathered parameter lies; one that is never freed may be saved as it is."""
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
                    f"uses a parameter that another module owns. Tell DeepSpeed by "
                    f"deepspeed.zero.register_external_parameter(module, parameter)."
                )
            return p.data.as_strided(saved.size, saved.stride, p.data.storage_offset() + saved.offset)

    # --- start-up ---------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters that the outermost module owns itself, until `beside` ends."""
        with Passthrough.set(True):
            for parameter in self.core.parameters(recurse=False):
                if not is_gathered(parameter):
                    parameter.all_gather()  # type: ignore[attr-defined]
                    self._gathered_here.append(parameter)

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Run forwards without backward in a block."""
        self.marking = False
        try:
            yield
        finally:
            self.marking = True

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run forwards and backwards in a block that leaves DeepSpeed's bookkeeping as it was."""
        awaited = {module: vars(module).get("applied_pre_backward_ref_cnt", 0) for module in self.core.modules()}
        saving, self._saving = self._saving, []
        for hooks in saving:
            hooks.__exit__()  # torch.func, by which rules go back through derivations, refuses to work under them
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
                    coordinator._invalidate_trace()  # learnt anew in the next forward
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
    """Stands in for an autograd function that marks a tensor: leaves alone what backward will not reach."""

    owner: Zero3
    function: Any

    def apply(self, x: Tensor) -> Tensor:
        """See torch.autograd.Function."""
        reached = x.requires_grad and not isinstance(x, nn.Parameter)
        return self.function.apply(x) if self.owner.marking and reached else x


@dataclass(frozen=True, slots=True)
class _Lent:
    """Stands in for a tensor that autograd saves, and that is a view of a gathered parameter."""

    parameter: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Values(Mapping[str, Tensor]):
    """Whole parameters by name; NaN in the right shape for one that is partitioned now."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        if is_gathered(parameter):
            return parameter
        # Where a derivation is replayed after its module has run it moves elements, and their values do not matter.
        # Should they, NaN shows.
        return torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
