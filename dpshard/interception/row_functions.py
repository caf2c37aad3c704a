"""Functions that treat every row separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.rules.elementwise import ELEMENTWISE
from dpshard.rules.routed import GROUPED
from dpshard.rules.torch_functions import Function, functions_named


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call whose outputs have as many rows as `routed`."""

    func: Function
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    routed: list[Tensor]
    outputs: list[Tensor]

    @property
    def first_only(self) -> bool:
        """Return True if only the first argument is routed."""
        return len(self.routed) == 1 and bool(self.args) and self.args[0] is self.routed[0]

    def others_lack_rows(self, rank: int) -> bool:
        """Return True if no unrouted tensor has rows that broadcast to outputs of `rank` dimensions."""
        followed = {id(x) for x in self.routed}
        return all(id(x) in followed or x.dim() < rank or len(x) == 1 for x in self.tensors)


def by_row(call: RowCall, N: int) -> bool:
    """Return True if row n of every output (of N rows) depends only on row n of the routed inputs."""
    if not call.outputs or any(x.dim() == 0 or len(x) != N for x in call.outputs):
        return False
    holds = _BY_ROW.get(call.func)
    return holds is not None and holds(call)


def argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    """Return an argument by position or name."""
    return args[place] if len(args) > place else kwargs.get(name)


_ACTIVATIONS = (
    "relu relu_ relu6 gelu silu mish sigmoid sigmoid_ logsigmoid tanh tanh_ softplus softsign hardswish hardsigmoid "
    "hardtanh elu selu celu leaky_relu tanhshrink threshold exp log log1p sqrt rsqrt square abs neg reciprocal sin cos "
    "erf nan_to_num zeros_like ones_like clone contiguous detach to float double half bfloat16 type type_as long int "
    "dropout alpha_dropout"
)
_COMPARISONS = (
    "remainder __mod__ floor round masked_fill masked_fill_ __neg__ "
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)
_ELEMENTWISE = (
    ELEMENTWISE | functions_named(_ACTIVATIONS.split(), (F, torch, Tensor)) | functions_named(_COMPARISONS.split())
)
_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # see rules.linear
_MAPPING_FIRST = frozenset({_LINEAR, F.linear, F.group_norm, F.embedding, F.prelu, torch.prelu}) | GROUPED
"""Functions that map every row of their first argument in the same way."""
_CONVOLVING = functions_named([f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)], [F])
_MATMUL = functions_named(["matmul", "mm", "bmm", "__matmul__"])
VIEWS = functions_named(["view", "reshape", "flatten", "unflatten"])
_ALONG = {
    **dict.fromkeys(functions_named(["chunk", "split", "split_with_sizes", "tensor_split", "norm"]), 2),
    **dict.fromkeys(
        functions_named(
            "softmax log_softmax sum mean unsqueeze squeeze cumsum glu cat amax amin gather".split(),
            (F, torch, Tensor),
        ),
        1,
    ),
}


def _first_only(call: RowCall) -> bool:
    return call.first_only


def _normalizes(call: RowCall) -> bool:
    return call.first_only and len(call.args[1]) < call.args[0].dim()  # otherwise it normalizes over rows


def _convolves(call: RowCall) -> bool:
    return call.first_only and call.args[0].dim() == call.args[1].dim()


def _attends(call: RowCall) -> bool:
    rank = call.outputs[0].dim()
    return rank > 2 and call.others_lack_rows(rank)


def _multiplies(call: RowCall) -> bool:
    if call.first_only:
        return call.args[0].dim() == 2
    return len(call.routed) == len(call.tensors) > 1 and call.args[0].dim() > 2


def _is_elementwise(call: RowCall) -> bool:
    rank = call.outputs[0].dim()
    return all(x.dim() == rank for x in call.routed) and call.others_lack_rows(rank)


def _is_along_others(call: RowCall) -> bool:
    dims = argument(call.args, call.kwargs, _ALONG[call.func], "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    rank = max(call.routed[0].dim(), call.outputs[0].dim())
    return len(call.routed) == len(call.tensors) and bool(dims) and all(d % rank != 0 for d in dims)


def _indexes_others(call: RowCall) -> bool:
    x, given = call.args[:2]
    index = given if isinstance(given, tuple) else (given,)
    whole = (index[0] is Ellipsis and len(index) <= x.dim()) or index[0] == slice(None)
    return call.first_only and bool(whole) and not any(isinstance(i, Tensor) for i in index)


_BY_ROW: dict[Function, Callable[[RowCall], bool]] = {  # a later entry replaces an earlier one of the same function
    Tensor.__getitem__: _indexes_others,
    **dict.fromkeys(_ALONG, _is_along_others),
    **dict.fromkeys(VIEWS, _first_only),
    **dict.fromkeys(_ELEMENTWISE, _is_elementwise),
    **dict.fromkeys(_MATMUL, _multiplies),
    F.scaled_dot_product_attention: _attends,
    **dict.fromkeys(_CONVOLVING, _convolves),
    **dict.fromkeys((F.layer_norm, F.rms_norm), _normalizes),
    **dict.fromkeys(_MAPPING_FIRST, _first_only),
}
