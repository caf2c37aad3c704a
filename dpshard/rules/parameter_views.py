"""Tensors derived only from parameters (`w.t()`, `1 + w`, `w[i]`), as sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.rules.call import Recompute, Source
from dpshard.rules.derived import ISOMETRIC, ISOMETRIC_PROPERTIES, transposes
from dpshard.rules.torch_functions import Function, function_name, outputs_of, tensors_of

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as"})


def derive(func: Function, args: Any, kwargs: Any, sources: dict[Tensor, Source], index: int, output: Tensor) -> Source:
    """Return the source for output number `index` of a function of parameters only."""
    tensors = list(tensors_of((args, kwargs)))
    parents = [sources[x] for x in tensors if x in sources]
    name, arguments = function_name(func), (*args, *kwargs.values())
    alike = output.is_complex() == tensors[0].is_complex()
    if torch.compiler.is_compiling():
        # Dynamo cannot rebuild every closure, and this source is never recomputed.
        recompute = _never_recomputed
    elif name in _CASTS and len(parents) == 1 and alike:
        # To repeat the cast would round the clipped sum in half precision.
        recompute = parents[0].recompute
    else:
        recompute = _recompute_of(func, args, kwargs, sources, index)
    number = _element(args[1]) if name == "__getitem__" and len(tensors[0].shape) > 1 else None
    rearranges = (func in ISOMETRIC or name in ISOMETRIC_PROPERTIES) and (alike or name not in _CASTS)
    picks_once = name != "__getitem__" or number is not None or _is_basic(args[1])
    return Source(
        label=f"{name}({', '.join(_text(x, sources) for x in arguments)})[{index}]",
        form=f"{name}({', '.join(_text(x, sources, sizes=False) for x in arguments)})[{index}]",
        roots=tuple(dict.fromkeys(root for parent in parents for root in parent.roots)),
        shape=tuple(output.shape),
        recompute=recompute,
        isometric=rearranges and picks_once and len(parents) == 1 and parents[0].isometric,
        exact=all(x in sources and sources[x].exact for x in tensors),
        transpose_of=parents[0] if transposes(name, args, tensors[0].shape) else None,
        slice_of=None if number is None else (parents[0], number % len(tensors[0])),
    )


def _recompute_of(func: Function, args: Any, kwargs: Any, sources: dict[Tensor, Source], index: int) -> Recompute:
    def kept(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return sources[x] if x in sources else x.detach()

    kept_args, kept_kwargs = pytree.tree_map(kept, (args, kwargs))

    def recompute(values: dict[str, Tensor]) -> Tensor:
        def value(x: Any) -> Any:
            return x.recompute(values) if isinstance(x, Source) else x

        own_args, own_kwargs = pytree.tree_map(value, (kept_args, kept_kwargs))
        return outputs_of(func(*own_args, **own_kwargs))[index]

    return recompute


def _never_recomputed(values: dict[str, Tensor]) -> Tensor:
    raise AssertionError("a source that was derived in a compiled region is never recomputed")


def _element(index: Any) -> int | None:
    """Return the element along dimension 0 if an index picks exactly one, else None."""
    if isinstance(index, Tensor):
        whole = index.dim() == 0 and index.dtype != torch.bool and not index.is_floating_point()
    else:
        whole = isinstance(index, int) and not isinstance(index, bool)
    return int(index) if whole and not torch.compiler.is_compiling() else None


def _is_basic(index: Any) -> bool:
    """Return False if an index has a tensor or a list, which may pick an element twice."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, (int, slice, type(None), type(...))) for i in indices)


def _text(x: Any, sources: dict[Tensor, Source], *, sizes: bool = True) -> str:
    if isinstance(x, Tensor):
        if x in sources:
            return sources[x].label if sizes else sources[x].form
        return f"constant{list(x.shape) if sizes else [x.dim()]}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(_text(item, sources, sizes=sizes) for item in x)})"
    return "slice" if isinstance(x, slice) and not sizes else repr(x)
