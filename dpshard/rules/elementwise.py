"""Elementwise functions of a bare parameter, and parameters expanded along the samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.rules.call import BatchAxis, Call, spread
from dpshard.rules.registry import rule
from dpshard.rules.torch_functions import functions_named

_NAMES = (
    *("add", "sub", "rsub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "pow", "float_power"),
    *("addcmul", "addcdiv", "lerp", "where", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max"),
    *("atan2", "copysign", "hypot", "logaddexp", "xlogy"),
)
_OPERATORS = ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "pow", "rpow", "ipow")
_DIVISIONS = ("truediv", "rtruediv", "itruediv", "div", "rdiv", "idiv")
ELEMENTWISE = functions_named(
    (*_NAMES, *(f"{name}_" for name in _NAMES), *(f"__{name}__" for name in _OPERATORS + _DIVISIONS))
)


# Attention broadcasts its mask and learned queries like an elementwise function.
@rule(*ELEMENTWISE, F.scaled_dot_product_attention)
def elementwise(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Return an elementwise function, with broadcasting."""
    args, kwargs = _spread_all(call, args, kwargs)
    return call.func(*args, **kwargs)


@rule(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
def masked_fill(call: Call, input: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Return `input` with masked elements replaced by a scalar parameter; by `where`, as its copies are no scalar."""
    if call.source(input) is not None:
        raise call.refuse("its output would be a parameter masked by the data; use torch.where")
    (input, mask, value), _ = _spread_all(call, (input, mask, value), {})
    filled = torch.where(mask, value, input)
    return input.copy_(filled) if call.func is Tensor.masked_fill_ else filled


def _spread_all(call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
    from_right, size, axis = _batch_position(call, (args, kwargs))

    def enter(x: Tensor) -> Tensor:
        return x if call.source(x) is None else spread(call, x, from_right, size, axis)

    return pytree.tree_map_only(Tensor, enter, (args, kwargs))


def _batch_position(call: Call, tree: Any) -> tuple[int, int, BatchAxis]:
    """Return the batch dimension from the right, its size, and the order of its rows."""
    found: set[tuple[int, int, BatchAxis]] = set()
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor) and call.source(x) is None:
            axis = call.axis(x)
            if axis is not None:
                size = x.shape[axis.dim]
                axis.require_order(size // call.batch_size)
                order = BatchAxis(0, axis.adjacent if size > call.batch_size else 0)
                found.add((x.dim() - axis.dim, size, order))
    if len(found) != 1:
        raise call.refuse("its data inputs carry the samples of the micro-batch in different dimensions")
    return found.pop()


@rule(Tensor.expand, Tensor.broadcast_to, torch.broadcast_to, Tensor.expand_as)
def expand(call: Call, x: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    """Expand a parameter of size 1 along the samples to B."""
    axis = call.output_axis
    if axis is None:
        raise call.refuse("its output carries no samples of the micro-batch")
    (first, *_) = sizes or kwargs.values()
    if isinstance(first, Tensor):
        shape = list(first.shape)
    else:
        shape = list(sizes) if isinstance(first, int) else list(first)
    rows = shape[axis.dim]
    copies = spread(call, x, len(shape) - axis.dim, rows, axis)
    shape[axis.dim] = -1
    return copies.expand(shape)


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def repeat(call: Call, x: Tensor, *repeats: Any, **kwargs: Any) -> Tensor:
    """Repeat a parameter once per sample: `token.repeat(B, 1, 1)`."""
    axis, source = call.output_axis, call.source(x)
    if axis is None or source is None:
        raise call.refuse("its output carries no samples of the micro-batch")
    (first, *_) = repeats or kwargs.values()
    times = list(repeats) if isinstance(first, int) else list(first)
    times = [1] * (len(source.shape) - len(times)) + times
    shape = (1,) * (len(times) - len(source.shape)) + source.shape
    B, each = call.batch_size, shape[axis.dim]
    k, rest = divmod(times[axis.dim], B)
    # Values cannot tell the order of rows; those of a unit lie as in the inputs.
    if rest or k not in (1, call.rows_per_unit) or (axis.adjacent and each > 1):
        raise call.refuse(f"it is repeated {times[axis.dim]} times along the samples, but there are {B}")
    copies = call.per_sample(x).reshape(B, *shape)
    if k > 1:
        copies = torch.cat([copies] * k, axis.dim + 1)
    rows = axis.merge(copies.squeeze(axis.dim + 1) if k * each == 1 else copies, k * each)
    times[axis.dim] = 1
    return rows.repeat(times)
