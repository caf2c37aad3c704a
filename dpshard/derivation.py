"""Tensors that are derived from parameters alone (`w.t()`, `1 + w`, `w[i]`), as sources of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpshard.calls import Function, function_name, outputs_of, tensors_of
from dpshard.rules.call import Source
from dpshard.rules.derived import ISOMETRIC, ISOMETRIC_PROPERTIES, transposes


def _traced(values: dict[str, Tensor]) -> Tensor:
    raise AssertionError("a source that was derived in a compiled region is never replayed")


_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as"})


def derive(func: Function, args: Any, kwargs: Any, sources: dict[Tensor, Source], index: int, output: Tensor) -> Source:
    """The source that is output number `index` of a function of parameters alone."""
    parents = [sources[x] for x in tensors_of((args, kwargs)) if x in sources]

    def frozen(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return sources[x] if x in sources else x.detach()

    kept = _replaced((args, kwargs), frozen)

    def replay(values: dict[str, Tensor]) -> Tensor:
        new_args, new_kwargs = _replaced(kept, lambda x: x.replay(values) if isinstance(x, Source) else x)
        return outputs_of(func(*new_args, **new_kwargs))[index]

    name = function_name(func)
    derivation: Callable[[dict[str, Tensor]], Tensor] = replay
    if name in _CASTS and len(parents) == 1:
        # Gradients go back as they are: a cast would round the clipped sum in half precision.
        derivation = parents[0].replay
    tensors = list(tensors_of((args, kwargs)))
    expert = _element(args[1]) if name == "__getitem__" and len(tensors[0].shape) > 1 else None
    only_rearranges = func in ISOMETRIC or name in ISOMETRIC_PROPERTIES
    # An index that is a tensor or a list may pick an element twice.
    simple = (int, slice, type(None), type(...))
    picks_by_list = (
        name == "__getitem__" and expert is None and not all(isinstance(i, simple) for i in _indices(args[1]))
    )
    arguments = (*args, *kwargs.values())
    return Source(
        label=f"{name}({', '.join(_text(x, sources) for x in arguments)})[{index}]",
        form=f"{name}({', '.join(_text(x, sources, sizes=False) for x in arguments)})[{index}]",
        roots=tuple(dict.fromkeys(root for parent in parents for root in parent.roots)),
        shape=tuple(output.shape),
        # A traced source leads nowhere (slots were made by the rehearsal), and dynamo cannot rebuild every closure.
        replay=_traced if torch.compiler.is_compiling() else derivation,
        isometric=only_rearranges and not picks_by_list and len(parents) == 1 and parents[0].isometric,
        exact=all(x in sources and sources[x].exact for x in tensors),
        transpose_of=parents[0] if transposes(name, args, tensors[0].shape) else None,
        slice_of=None if expert is None else (parents[0], expert % len(tensors[0])),
    )


def _replaced(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """Arguments `x` with `leaf` of everything in place of it, also within dicts, lists and (named) tuples."""
    if isinstance(x, dict):
        return {key: _replaced(value, leaf) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        items = [_replaced(item, leaf) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return leaf(x)


def _element(index: Any) -> int | None:
    """Which element along dimension 0 an index picks, if it is one: a number, or the number of an expert."""
    if isinstance(index, Tensor):
        whole = index.dim() == 0 and index.dtype != torch.bool and not index.is_floating_point()
    else:
        whole = isinstance(index, int) and not isinstance(index, bool)
    return int(index) if whole and not torch.compiler.is_compiling() else None


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _text(x: Any, sources: dict[Tensor, Source], *, sizes: bool = True) -> str:
    if isinstance(x, Tensor):
        if x in sources:
            return sources[x].label if sizes else sources[x].form
        return f"constant{list(x.shape) if sizes else [x.dim()]}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(_text(item, sources, sizes=sizes) for item in x)})"
    return "slice" if isinstance(x, slice) and not sizes else repr(x)
