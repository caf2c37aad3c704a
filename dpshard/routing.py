"""Whose row is it: rows that the data picks, or sends to experts, keep the number of their sample.

[Note: Routed rows]
`x[token_ids]` has as many rows as the data says, in an order that the data says: its shape tells nothing. So it is
followed by its values. A route starts where a tensor of all samples' rows is indexed along dimension 0; it goes on
through functions of which row n of the output is made of row n of the input alone; and it ends where the rows are added
to rows of their own samples, or where they lie in the order of the samples again (an index that undoes the first) and
meet any other function. Rows that meet one in another order are lost: the parameter that they meet next is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpshard.calls import Function, functions_named, outputs_of, tensors_of
from dpshard.rules.elementwise import ELEMENTWISE
from dpshard.rules.routed import GROUPED

PICKING = functions_named(["masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"])
"""Functions whose number of output rows depends on the values of the data."""

ADDING = functions_named(["index_add", "index_add_", "index_copy", "index_copy_"])
"""Functions that write rows into their first argument, at numbers that they are given."""

_SELECTING = functions_named(["index_select"])

# What follows are the functions that `_by_row` knows, by how it must look at their arguments.
_ACTIVATIONS = (
    "relu relu_ relu6 gelu silu mish sigmoid sigmoid_ logsigmoid tanh tanh_ softplus softsign hardswish hardsigmoid "
    "hardtanh elu selu celu leaky_relu tanhshrink threshold exp log log1p sqrt rsqrt square abs neg reciprocal sin cos "
    "erf nan_to_num clone contiguous detach to float double half bfloat16 type type_as dropout alpha_dropout"
)
_COMPARISONS = "masked_fill masked_fill_ __neg__ eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
_ELEMENTWISE = (
    ELEMENTWISE | functions_named(_ACTIVATIONS.split(), (F, torch, Tensor)) | functions_named(_COMPARISONS.split())
)
_LINEAR = torch._C._nn.linear  # type: ignore[attr-defined]  # see rules.linear
_MAPPING_FIRST = frozenset({_LINEAR, F.linear, F.layer_norm, F.rms_norm, F.group_norm, F.embedding}) | GROUPED
"""Functions that map every row of their first argument alike."""
_MATMUL = functions_named(["matmul", "mm", "bmm", "__matmul__"])
_VIEWS = functions_named(["view", "reshape", "flatten", "unflatten"])
_ALONG = {
    **dict.fromkeys(functions_named(["chunk", "split", "split_with_sizes", "tensor_split", "norm"]), 2),
    **dict.fromkeys(
        functions_named(
            "softmax log_softmax sum mean unsqueeze squeeze cumsum glu cat amax amin".split(), (F, torch, Tensor)
        ),
        1,
    ),
}
"""Functions along a dimension, and at which place they take it."""


def picks(func: Function, args: Any) -> bool:
    """Whether values of the data decide how many rows `func` returns."""
    if func in PICKING or (func is torch.where and len(args) == 1):
        return True
    if func is torch._pack_padded_sequence:
        return bool((args[1] != args[1][0]).any())  # rows of equal lengths lie one batch apart, as [T, B] does
    index = args[1] if func is Tensor.__getitem__ else ()
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _row_numbers(index: Any) -> Tensor | None:
    """The rows [N] that an index picks along dimension 0; None if it does anything else."""
    first, *others = index if isinstance(index, tuple) else (index,)
    tensors = [i for i in others if isinstance(i, Tensor)]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return None
    if first.dtype in (torch.bool, torch.uint8):
        return None if tensors else first.nonzero()[:, 0]
    beside = all(i.dim() == 0 or (i.dim() == 1 and len(i) in (1, len(first))) for i in tensors)
    masks = any(i.dtype in (torch.bool, torch.uint8) for i in tensors)
    return first if first.dim() == 1 and beside and not masks else None


def _indexed(func: Function, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """What `func` picks rows of along dimension 0, and their numbers [N]."""
    if func is Tensor.__getitem__:
        x, rows = args[0], _row_numbers(args[1])
    elif func in _SELECTING and _argument(args, kwargs, 1, "dim") == 0:
        x, rows = args[0], _argument(args, kwargs, 2, "index")
    else:
        return None
    return None if rows is None or rows.dim() != 1 else (x, rows)


class Routing:
    """Follows routed rows through one forward."""

    def __init__(self, batch_size: int, holds_samples: Callable[[Tensor, bool], bool]) -> None:
        """`holds_samples(x, read)`: whether evidence says that dimension 0 of `x` holds the rows of all samples.

        `read`: rows are read from it, so that their order counts, rather than added to it.
        """
        self.batch_size = batch_size
        self.holds_samples = holds_samples
        # Weak: what a forward has dropped is not kept alive.
        self._samples: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lost: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._idle = True

    def samples(self, x: Tensor) -> Tensor | None:
        """The sample of every row of `x`, int64 [N]; None if its rows were not routed."""
        return None if self._idle else self._samples.get(x)

    def lost(self, x: Tensor) -> bool:
        """Whether nobody can tell any more which sample a row of `x` belongs to."""
        return not self._idle and x.dim() > 0 and x in self._lost

    def in_order(self, sample_N: Tensor) -> bool:
        """Whether the rows lie as if they had never been routed: every sample has equally many, one after the other."""
        return len(sample_N) % self.batch_size == 0 and torch.equal(sample_N, self._numbers(sample_N))

    def follow(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        """Note where the rows of the arguments of a call have gone."""
        if self._idle and not (func is Tensor.__getitem__ or func in _SELECTING or picks(func, args)):
            return
        with torch.no_grad():
            self._follow(func, args, kwargs, result)

    def _follow(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        outputs, indexed = outputs_of(result), _indexed(func, args, kwargs)
        if indexed is not None and not self.lost(indexed[0]):
            x, rows = indexed
            sample_N = self._of(x, read=True)
            if sample_N is not None:
                self._put(outputs, sample_N[rows])
                return
        tensors = list(tensors_of((args, kwargs)))
        routed = [x for x in tensors if self.samples(x) is not None]
        lost = picks(func, args) or any(self.lost(x) for x in tensors)
        if func in ADDING or func is Tensor.__setitem__:
            if lost or routed:
                self._add(func, args, kwargs, outputs or [args[0]])
        elif lost:
            self._lose(outputs)
        elif routed:
            sample_N = self.agreed(routed)
            if sample_N is not None and _by_row(func, args, kwargs, tensors, routed, outputs, len(sample_N)):
                self._put(outputs, sample_N)
            elif sample_N is None or not self.in_order(sample_N):
                self._lose(outputs)

    def agreed(self, routed: list[Tensor]) -> Tensor | None:
        """The samples of the rows of all tensors of `routed`, if they are the same."""
        first, *others = (self._samples[x] for x in routed)
        return first if all(other is first or torch.equal(first, other) for other in others) else None

    def _add(self, func: Function, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Rows come home where every one is added to a row of its own sample."""
        if func is Tensor.__setitem__:
            base, rows, source = args[0], _row_numbers(args[1]), args[2]
        else:
            along_rows = _argument(args, kwargs, 1, "dim") == 0
            base, rows, source = args[0], _argument(args, kwargs, 2, "index"), _argument(args, kwargs, 3, "source")
            rows = rows if along_rows else None
        home = None if self.lost(base) or rows is None else self._of(base, read=False)
        own = self.samples(source) if isinstance(source, Tensor) else None
        if home is None or own is None or rows is None or not torch.equal(home[rows], own):
            self._lose(outputs)
        else:
            self._put(outputs, self.samples(base))

    def _of(self, x: Tensor, *, read: bool) -> Tensor | None:
        known = self.samples(x)
        if known is not None:
            return known
        whole = x.dim() > 0 and len(x) > 0 and len(x) % self.batch_size == 0
        return self._numbers(x) if self.holds_samples(x, read) and whole else None

    def _numbers(self, x: Tensor) -> Tensor:
        return torch.arange(len(x), device=x.device) // max(1, len(x) // self.batch_size)

    def _put(self, outputs: list[Tensor], sample_N: Tensor | None) -> None:
        for x in outputs:
            self._lost.pop(x, None)
            if sample_N is not None:
                self._samples[x] = sample_N
                self._idle = False
            else:
                self._samples.pop(x, None)

    def _lose(self, outputs: list[Tensor]) -> None:
        for x in outputs:
            self._samples.pop(x, None)
            self._lost[x] = True
            self._idle = False


def _by_row(
    func: Function, args: Any, kwargs: Any, tensors: list[Tensor], routed: list[Tensor], outputs: list[Tensor], N: int
) -> bool:
    """Whether row n of every output is made of row n of the `routed` inputs, and of what has no rows, alone."""
    if not outputs or any(x.dim() == 0 or len(x) != N for x in outputs):
        return False
    alone = len(routed) == 1 and args and args[0] is routed[0]
    if func in _MAPPING_FIRST:
        return bool(alone)
    if func in _MATMUL:
        return (len(routed) == len(tensors) > 1 and args[0].dim() > 2) or bool(alone and args[0].dim() == 2)
    if func in _ELEMENTWISE:
        rank = outputs[0].dim()
        followed = {id(x) for x in routed}
        return all(x.dim() == rank if id(x) in followed else x.dim() < rank or len(x) == 1 for x in tensors)
    if func in _VIEWS:
        return bool(alone)
    if func in _ALONG:
        dims = _argument(args, kwargs, _ALONG[func], "dim")
        dims = (dims,) if isinstance(dims, int) else dims
        rank = max(routed[0].dim(), outputs[0].dim())
        return len(routed) == len(tensors) and bool(dims) and all(d % rank != 0 for d in dims)
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        whole = (index[0] is Ellipsis and len(index) <= args[0].dim()) or index[0] == slice(None)
        return bool(alone and whole) and not any(isinstance(i, Tensor) for i in index) and None not in index
    return False
