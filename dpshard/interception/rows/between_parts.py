"""Refuse unverified computations between two forwards of one micro-batch that may mix rows.

Inputs may be row-by-row functions of an earlier forward's outputs. Autograd's graph shows all other functions, except
those of detached values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dpshard.errors import BatchLayoutError

_OF_ELEMENTS = frozenset(
    "Tanh Relu Gelu Silu Sigmoid LeakyRelu Elu Hardtanh Hardswish Softplus Mish Neg Exp Log Abs Sqrt Sin Cos ClampMin "
    "Alias ToCopy Clone NativeDropout".split()
)
"""Nodes of elementwise functions of one tensor."""
_OF_PAIRS = frozenset("Add Sub Mul Div".split())
"""Nodes of elementwise functions of two tensors."""
_WITHIN_ROWS = frozenset(
    "View UnsafeView ReshapeAlias Expand Select Slice Mean Sum Softmax LogSoftmax LinalgVectorNorm Unsqueeze Squeeze "
    "Transpose NativeLayerNorm".split()
)
"""Nodes of functions that keep rows apart, unless they act along dimension 0."""
_JOINED = frozenset("Cat Stack".split())
_UNCHANGED = frozenset(
    "RegisterPreBackwardFunction RegisterPostBackwardFunction PreBackwardFunctionForModule PostBackwardFunctionModule "
    "BackwardHookFunction".split()
)
"""Nodes of identities by which torch and DeepSpeed run code in backward."""
_OF_PARAMETERS = frozenset("_Tap _RegionTap Slot Anchor _Cut".split())
"""Nodes of dpshard."""


def outputs_in_graph(leaves: Iterable[Any]) -> list[Any]:
    """Return the graph nodes of tensors, also in objects' attributes."""
    tensors = [y for x in leaves for y in ([x] if isinstance(x, Tensor) else getattr(x, "__dict__", {}).values())]
    return [x.grad_fn for x in tensors if isinstance(x, Tensor) and x.grad_fn is not None]


def refuse_between(inputs: Iterable[Tensor], earlier: list[Any], *, rows: int) -> None:
    """Raise BatchLayoutError if an input depends on `earlier` outputs (nodes), but not row by row."""
    made = set(earlier)
    for x in inputs:
        node = x.grad_fn
        if node in made and all(size % rows for size in x.shape[:2]):
            raise BatchLayoutError(
                f"An input of shape {tuple(x.shape)} is an output of another call of the model, or of a part of it. "
                f"It has no row per sample. It may depend on all samples, or on parameters. Compute it within the "
                f"forward that uses it, or put both calls into the forward of one module."
            )
        if node is None or node in made or (len(x) == rows and _keeps_rows(x, made, rows)):
            continue
        if _depends(node, made):
            raise BatchLayoutError(
                f"An input of shape {tuple(x.shape)} was computed in the loop ({_name(node)}) from the output of "
                f"another call of the model, or of its part. Verification does not see computations between two calls: "
                f"they may mix samples, or change their order. Put it into the forward of one module, together with "
                f"both calls, and call that module."
            )


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]


def _keeps_rows(x: Tensor, made: set[Any], rows: int) -> bool:
    waiting: list[tuple[Any, int]] = [(x.grad_fn, x.output_nr)]
    seen = set(waiting)
    while waiting:
        node, place = waiting.pop()
        if node in made:
            size = node._input_metadata[place].shape
            if not size or size[0] != rows or rows in size[1:2]:
                return False  # [T, B, ...] with T = B looks the same
            continue
        name = _name(node)
        before = list(node.next_functions)
        if name in _UNCHANGED and len(before) > place:
            before = [before[place]]
        elif not _is_rowwise(node, name, rows):
            return False
        if name in _JOINED or name == "NativeLayerNorm":
            before = [following for following in before if following[0] is not None]
        if not before or any(following is None for following, _ in before):
            return False
        waiting += [following for following in before if following not in seen]
        seen.update(before)
    return True


def _is_rowwise(node: Any, name: str, rows: int) -> bool:
    shape = node._input_metadata[0].shape
    operands = [tuple(x._input_metadata[place].shape) for x, place in node.next_functions if x is not None]
    if name in _OF_ELEMENTS:
        return len(node.next_functions) == 1
    if name in _OF_PAIRS:  # a tensor of fewer dimensions is one row, broadcast to all
        return len(operands) == 2 and all(len(x) == len(shape) and x[0] == rows for x in operands)
    if name in _JOINED:
        return 0 not in _dims(node._saved_dim, len(shape))
    if name == "Expand" and len(shape) != len(operands[0]):
        return False  # expand adds new dimensions in front
    return name in _WITHIN_ROWS and len(operands) == 1 and _within_rows(node, name, operands[0], rows)


def _within_rows(node: Any, name: str, size: tuple[int, ...], rows: int) -> bool:
    if name == "Unsqueeze":
        return 0 not in _dims(node._saved_dim, len(size) + 1)
    if not size or size[0] != rows:
        return False
    if name in ("View", "UnsafeView", "ReshapeAlias", "Expand") or (name == "Squeeze" and rows > 1):
        return True
    if name == "NativeLayerNorm":
        return len(node._saved_normalized_shape) < len(size)
    saved = (node._saved_dim0, node._saved_dim1) if name == "Transpose" else getattr(node, "_saved_dim", ())
    dims = _dims(saved, len(size))
    whole = name == "Slice" and node._saved_start in (0, None) and node._saved_end >= rows and node._saved_step == 1
    return bool(dims) and (0 not in dims or (whole and len(dims) == 1))


def _dims(saved: Any, count: int) -> list[int]:
    """Return saved dimensions; autograd stores negative ones as unsigned integers."""
    dims = list(saved) if isinstance(saved, (tuple, list)) else [saved]
    return [(d - 2**64 if d >= 2**63 else d) % count for d in dims]


def _depends(node: Any, made: set[Any]) -> bool:
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node in made or _name(node) in _OF_PARAMETERS:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False
