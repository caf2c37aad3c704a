"""Calls within torch.vmap, which hides a dimension, as calls on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from dpshard.rules.torch_functions import Function, function_name, outputs_of

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # torch.func uses it, too
outside_transforms = temporarily_clear_interpreter_stack


def transforms_are_active() -> bool:
    """Return True within a transform of torch.func; False in compiled code."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


@dataclass(frozen=True, slots=True)
class Lifted:
    """A call within torch.vmap on whole tensors."""

    func: Function
    args: Any
    kwargs: Any
    levels: tuple[int, ...]
    """Levels of the vmaps that hide dimensions, outermost first."""
    differentiated: bool
    """True if torch.func.grad or jvp wraps an argument."""

    def lower(self, result: Any) -> Any:
        """Return the result with hidden dimensions, as the vmapped function gets it."""

        def hide(x: Tensor) -> Tensor:
            for level in self.levels:
                x = _functorch._add_batch_dim(x, 0, level)
            return x

        return pytree.tree_map_only(Tensor, hide, result)


def lift(func: Function, args: Any, kwargs: Any) -> Lifted:
    """Return a call within torch.vmap on whole tensors."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    hidden: list[dict[int, int]] = []
    differentiated = False
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            dims: dict[int, int] = {}
            while _functorch.is_functorch_wrapped_tensor(x):
                if _functorch.is_batchedtensor(x):
                    dims[_functorch.maybe_get_level(x)] = _functorch.maybe_get_bdim(x)
                else:
                    differentiated = True
                x = _functorch.get_unwrapped(x)
            leaves[i] = x
            hidden.append(dims)
    levels = tuple(sorted({level for dims in hidden for level in dims}))
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    dims_of_levels = tuple(tuple(dims.get(level) for dims in hidden) for level in levels)
    return Lifted(Vmapped(func, levels, dims_of_levels) if levels else func, args, kwargs, levels, differentiated)


@dataclass(frozen=True)
class Vmapped:
    """A function under torch.vmap, for whole tensors; outputs have the hidden dimensions first."""

    func: Function
    levels: tuple[int, ...]
    hidden: tuple[tuple[int | None, ...], ...]
    """Hidden dimension per tensor and level, counted without the dimensions of outer levels."""

    @property
    def __name__(self) -> str:
        return f"vmap({function_name(self.func)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return results other than tensors as they are."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        plain: list[Any] = []

        def run(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(filled, tree)
            result = self.func(*own_args, **own_kwargs)
            plain.append(result)
            return result if outputs_of(result) else torch.zeros(())

        for dims in reversed(self.hidden):
            run = torch.vmap(run, dims, randomness="different")
        result = run(*(leaves[i] for i in places))
        return result if outputs_of(plain[0]) else plain[0]
