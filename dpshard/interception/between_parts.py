"""What a loop computes between two forwards of one micro-batch: nobody verifies it, so it must not mix rows.

The second forward may get what an earlier one has returned, or what torch computes of it row by row, as it must: single
elements, and picks and means within a row. Other inputs must not depend on earlier outputs. Autograd's graph tells, so
what was detached in between is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dpshard.errors import BatchLayoutError

_OF_ELEMENTS = frozenset(
    "Tanh Relu Gelu Silu Sigmoid LeakyRelu Elu Hardtanh Hardswish Softplus Mish Neg Exp Abs Alias ToCopy Clone "
    "NativeDropout".split()
)
"""Functions of one tensor, element by element."""
_WITHIN_ROWS = frozenset("View UnsafeView ReshapeAlias Select Slice Mean Unsqueeze Squeeze".split())
"""Functions of one tensor that keep its rows, unless they touch dimension 0."""
_UNCHANGED = frozenset(
    "RegisterPreBackwardFunction RegisterPostBackwardFunction PreBackwardFunctionForModule PostBackwardFunctionModule "
    "BackwardHookFunction".split()
)
"""Functions with which torch and DeepSpeed learn that backward comes by: outputs are inputs."""
_OF_PARAMETERS = frozenset("_Tap _RegionTap Slot Anchor _Cut".split())
"""Of dpshard: what parameters of the engine have made."""


def outputs_in_graph(leaves: Iterable[Any]) -> list[Any]:
    """The graph nodes that have made these tensors, and the tensors that hang on objects among them."""
    tensors = [y for x in leaves for y in ([x] if isinstance(x, Tensor) else getattr(x, "__dict__", {}).values())]
    return [x.grad_fn for x in tensors if isinstance(x, Tensor) and x.grad_fn is not None]


def refuse_between(inputs: Iterable[Tensor], earlier: list[Any], *, rows: int) -> None:
    """Raise BatchLayoutError if an input was computed from outputs of forwards, the nodes `earlier`, not row by row."""
    made = set(earlier)
    for x in inputs:
        node = x.grad_fn
        if node is None or node in made or (len(x) == rows and _keeps_rows(x, made, rows)):
            continue
        if _depends(node, made):
            raise BatchLayoutError(
                f"An input of shape {tuple(x.shape)} was computed in the loop from what another call of the model, or "
                f"of a part of it, has returned ({_name(node)}). What lies between two calls is not verified: it may "
                f"mix samples, or change their order. Put it into the forward of one module, together with both calls, "
                f"and call that module."
            )


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name()).rpartition("::")[2]


def _keeps_rows(x: Tensor, made: set[Any], rows: int) -> bool:
    """Whether `x` follows from one of `made` by functions of one tensor that keep its rows."""
    node: Any = x.grad_fn
    place = x.output_nr
    while node not in made:
        name = _name(node)
        before = [following for following in node.next_functions if following[0] is not None]
        if name in _UNCHANGED and len(node.next_functions) > place:
            before = [node.next_functions[place]]
        elif name not in _OF_ELEMENTS and not (name in _WITHIN_ROWS and _within_rows(node, name, rows)):
            return False
        if len(before) != 1 or before[0][0] is None:
            return False
        node, place = before[0]
    return True


def _within_rows(node: Any, name: str, rows: int) -> bool:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if name == "Unsqueeze":
        return _dims(node._saved_dim) != [0]
    if sizes is None or not sizes or sizes[0] != rows:
        return False
    if name in ("View", "UnsafeView", "ReshapeAlias") or (name == "Squeeze" and rows > 1):
        return True
    dims = [d % len(sizes) for d in _dims(getattr(node, "_saved_dim", 0))]
    whole = name == "Slice" and node._saved_start in (0, None) and node._saved_end >= rows and node._saved_step == 1
    return bool(dims) and (0 not in dims or (whole and len(dims) == 1))


def _dims(saved: Any) -> list[int]:
    """Dimensions that a node has saved: autograd shows those below 0 as unsigned."""
    dims = list(saved) if isinstance(saved, (tuple, list)) else [saved]
    return [d - 2**64 if d >= 2**63 else d for d in dims]


def _depends(node: Any, made: set[Any]) -> bool:
    """Whether `node` follows from one of `made`, or from anything else that parameters of the engine have made."""
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
