"""Tracks the sample of each row after indexing by the data.

A route starts where data index dimension 0 of a tensor with the rows of all samples. It continues through functions
that make row n of the output from row n of the input only. It ends where rows return to sample order, or are added to
rows of their own sample. After any other function, the samples of rows out of order are unknown, and parameters refuse
the rows.

pack_padded_sequence makes rows: step 0 of all samples, then step 1 of all samples with two steps or more.
pad_packed_sequence returns a column per sample, along dimension 1: [T, B, ...], and last states [L, B, H]. Columns out
of order may be permuted, packed, or read step by step.

Ranks with parts of one model may exchange rows, and the samples of these, by all_to_all_single.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpshard.interception.protocols import Exchange
from dpshard.interception.row_functions import VIEWS, RowCall, argument, by_row
from dpshard.rules.torch_functions import Function, function_name, functions_named, outputs_of, tensors_of

PICKING = functions_named(["masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"])
"""Functions whose number of output rows depends on the data."""

_SCATTERING = functions_named(["scatter_add", "scatter_add_"])
ADDING = functions_named(["index_add", "index_add_", "index_copy", "index_copy_"]) | _SCATTERING
"""Functions that write rows into their first argument."""
_REPLACING = functions_named(["index_copy", "index_copy_"]) | {Tensor.__setitem__}

_SELECTING = functions_named(["index_select"])
_CUTTING = functions_named(["split", "split_with_sizes", "chunk"])
_JOINING = functions_named(["cat", "concat", "concatenate"])
_TRANSPOSING = functions_named(["transpose", "swapaxes", "swapdims", "permute"])
_UNBINDING = functions_named(["unbind"])

_SENDING = ("all_to_all_single",)
_WAITING = ("wait_tensor", "_wrap_tensor_autograd")
"""Names, because torch has a packet and overloads of each."""
PACK, PAD = torch._pack_padded_sequence, torch._pad_packed_sequence


def picks(func: Function, args: Any) -> bool:
    """Return True if the data decides the number of output rows."""
    if func in PICKING or func is PACK or _collective(func) in _SENDING or (func is torch.where and len(args) == 1):
        return True
    index = args[1] if func is Tensor.__getitem__ else ()
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _collective(func: Function) -> str:
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "_qualified_op_name", "")
    return name.partition("::")[2] if name.startswith("_c10d_functional") else ""


STARTING = PICKING | _SELECTING | {Tensor.__getitem__, torch.where, PACK, PAD}
"""Functions that may start a route."""


def _starts(func: Function, args: Any) -> bool:
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(not isinstance(i, (int, slice, type(None), type(...))) for i in index)
    return func in STARTING and (func is not torch.where or len(args) == 1)


def _row_numbers(index: Any) -> Tensor | None:
    first, *others = index if isinstance(index, tuple) else (index,)
    tensors = [i for i in others if isinstance(i, Tensor)]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return None
    if first.dtype in (torch.bool, torch.uint8):
        return None if tensors else first.nonzero()[:, 0]
    broadcasts = all(i.dim() == 0 or (i.dim() == 1 and len(i) in (1, len(first))) for i in tensors)
    masks = any(i.dtype in (torch.bool, torch.uint8) for i in tensors)
    return first if first.dim() == 1 and broadcasts and not masks else None


def _numbers_in(index: Any) -> Any:
    numbers = isinstance(index, np.ndarray) or (isinstance(index, (list, range)) and all(type(i) is int for i in index))
    return torch.as_tensor(index) if numbers else index


def _indexed(func: Function, args: Any, kwargs: Any) -> tuple[Tensor, int, Tensor, int] | None:
    """Return the tensor, dimension and indices [N] of a pick, and their dimension in the output; else None."""
    shift = 0
    if func is Tensor.__getitem__:
        x, index, dim = args[0], tuple(_numbers_in(i) for i in (args[1] if isinstance(args[1], tuple) else args[1:])), 0
        if len(index) == 2 and isinstance(index[0], slice) and index[0] == slice(None):
            dim, rows = 1, index[1]
        elif len(index) == 2 and index[0] is None:
            rows, shift = _row_numbers(index[1:]), 1
        else:
            rows = _row_numbers(index)
    elif func in _SELECTING:
        x, dim, rows = args[0], argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index").view(-1)
    else:
        return None
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype in (torch.bool, torch.uint8):
        return None
    return (x, dim, rows, dim + shift) if dim in (0, 1) else None


def _targets(func: Function, index: Tensor) -> Tensor | None:
    """Return the target rows [N]; None for scattered elements."""
    if func not in _SCATTERING:
        return index.view(-1)
    whole = index.dim() == 2 and index.shape[1] > 0 and (index.stride(1) == 0 or bool((index == index[:, :1]).all()))
    return index[:, 0] if whole else None


def _is_of_whole_rows(index: Any) -> bool:
    others = index[1:] if isinstance(index, tuple) else ()
    return all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in others)


def _permutes(rows: Tensor, N: int) -> bool:
    return len(rows) == N and bool((torch.bincount(rows, minlength=N) == 1).all())


def _order_of_dims(func: Function, args: Any, kwargs: Any) -> list[int]:
    rank = args[0].dim()
    given = [*args[1:], *kwargs.values()]
    dims = [d % rank for x in given for d in (x if isinstance(x, (tuple, list)) else (x,))]
    if function_name(func) == "permute":
        return dims
    order, (first, second) = list(range(rank)), dims
    order[first], order[second] = second, first
    return order


class _Traced(NamedTuple):
    """The samples of a tensor's rows, or columns."""

    sample_N: Tensor | None
    """None: unknown."""
    dim: int = 0
    in_order: bool = True
    """False for columns out of sample order."""


class Routing:
    """Follows routed rows."""

    def __init__(
        self,
        batch_size: int,
        holds_samples: Callable[[Tensor, int, bool], bool],
        exchange: Exchange | None = None,
    ) -> None:
        """Take `holds_samples(x, dim, read)`: True if a probe found all samples along dimension `dim` (0 or 1) of `x`.

        `read`: the order of rows matters.
        """
        self._exchange = exchange
        self.batch_size = batch_size
        self.holds_samples = holds_samples
        # Weak, so that tensors are freed as usual.
        self._traced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._unplaced: list[tuple[int, Tensor]] = []  # length of the dimension, indices picked
        self.idle = True

    def suspects(self, n: int) -> list[int]:
        """Return up to n samples whose rows may have been picked where no probe found samples."""
        lengths = [(length // self.batch_size, rows) for length, rows in self._unplaced]
        found = (int(row) // k for k, rows in reversed(lengths) if k for row in rows[:n].tolist())
        return list(dict.fromkeys(i for i in found if 0 <= i < self.batch_size))[:n]

    def samples(self, x: Tensor) -> Tensor | None:
        """Return the samples of the rows, int64 [N]; None if not routed."""
        return self._along(x, 0)

    def lost(self, x: Tensor) -> bool:
        """Return True if the samples of the rows are unknown."""
        if self.idle or x.dim() == 0:
            return False
        traced = self._traced.get(x)
        return traced is not None and (traced.sample_N is None or not traced.in_order)

    def in_order(self, sample_N: Tensor) -> bool:
        """Return True if rows are in sample order."""
        return len(sample_N) % self.batch_size == 0 and torch.equal(sample_N, self._numbers(sample_N))

    def follow(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        """Note the samples of a call's output rows."""
        if self.idle and not _starts(func, args):
            return
        with torch.no_grad():
            self._follow(func, args, kwargs, result)

    def _follow(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        outputs, indexed = outputs_of(result), _indexed(func, args, kwargs)
        if func is PACK:
            self._pack(args, kwargs, *outputs)
            return
        if func is PAD:
            self._pad(args, kwargs, *outputs)
            return
        if name := _collective(func):
            self._send(name, args, outputs)
            return
        if indexed is not None:
            x, dim, rows, to_dim = indexed
            self._unplaced.append((x.shape[dim], rows))  # even if `holds_samples` raises
            sample_N = self._of(x, dim, read=True)
            if sample_N is not None:
                self._unplaced.pop()
                self._put(outputs, sample_N[rows.to(sample_N.device)], to_dim)
                return
        if func in _TRANSPOSING and self._move_dims(args[0], outputs[0], _order_of_dims(func, args, kwargs)):
            return
        moved = self._moved(func, args, kwargs, outputs)
        if moved is not None:
            for x, sample_N in zip(outputs, moved, strict=True):
                self._put([x], sample_N)
            return
        tensors = tensors_of((args, kwargs))
        routed = [x for x in tensors if self.samples(x) is not None]
        lost = picks(func, args) or any(self.lost(x) for x in tensors)
        if func is Tensor.__setitem__ and not lost and not isinstance(args[2], Tensor):
            return  # writes a number, not rows
        within = func in _SCATTERING and argument(args, kwargs, 1, "dim") != 0
        if (func in ADDING and not within) or func is Tensor.__setitem__:
            if lost or routed:
                self._add(func, args, kwargs, outputs or [args[0]])
        elif lost:
            self.lose(outputs)
        elif routed:
            sample_N = self.agreed(routed)
            call = RowCall(func, args, kwargs, tensors, routed, outputs)
            if sample_N is not None and by_row(call, len(sample_N)):
                self._put(outputs, sample_N)
            elif sample_N is None or not self.in_order(sample_N):
                self.lose(outputs)

    def _send(self, name: str, args: Any, outputs: list[Tensor]) -> None:
        sample_N = self.samples(args[0]) if isinstance(args[0], Tensor) else None
        if name in _WAITING:
            if sample_N is not None:
                self._put(outputs, sample_N)
            elif self.lost(args[0]):
                self.lose(outputs)
        elif name in _SENDING and sample_N is not None and self._exchange and self._exchange.knows(args[3]):
            arrived_R = self._exchange.send_samples(sample_N, args[1], args[2], self.batch_size)
            if arrived_R is None:
                self.lose(outputs)
            else:
                self._put(outputs, arrived_R)
        elif sample_N is not None or self.lost(args[0]):
            self.lose(outputs)

    def _pack(self, args: Any, kwargs: Any, data: Tensor, batch_sizes: Tensor) -> None:
        sample_B = self._of(args[0], 0 if argument(args, kwargs, 2, "batch_first") else 1, read=True)
        self.lose([batch_sizes])
        if sample_B is None:
            self.lose([data])
        else:
            self._put([data], torch.cat([sample_B[:rows] for rows in batch_sizes.tolist()]))

    def _pad(self, args: Any, kwargs: Any, padded: Tensor, lengths: Tensor) -> None:
        sample_N, sizes = self.samples(args[0]), argument(args, kwargs, 1, "batch_sizes").tolist()
        if sample_N is not None:
            sample_B = sample_N[: sizes[0]]
            if torch.equal(sample_N, torch.cat([sample_B[:rows] for rows in sizes])):
                self._put([padded], sample_B, 0 if argument(args, kwargs, 2, "batch_first") else 1)
                self._put([lengths], sample_B)
                return
        self.lose([padded, lengths])

    def _move_dims(self, x: Tensor, output: Tensor, order: Sequence[int]) -> bool:
        """Return True if the samples of rows were noted at dimension 0 or 1 of the output."""
        traced = self._traced.get(x)
        if traced is None or traced.sample_N is None:
            return False
        to_dim = order.index(traced.dim)
        if to_dim <= 1:
            self._put([output], traced.sample_N, to_dim)
        return to_dim <= 1

    def _moved(self, func: Function, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Tensor] | None:
        if func in _JOINING:
            parts = [self.samples(x) for x in argument(args, kwargs, 0, "tensors")]
            along_rows = argument(args, kwargs, 1, "dim") in (0, None)
            known = [part for part in parts if part is not None]
            return [torch.cat(known)] if along_rows and len(known) == len(parts) else None
        sample_N = columns = None
        if args and isinstance(args[0], Tensor):
            sample_N, columns = self.samples(args[0]), self._along(args[0], 1)
        if columns is not None and func in _UNBINDING and argument(args, kwargs, 1, "dim") in (0, None):
            return [columns] * len(outputs)
        if columns is not None and func in VIEWS and len(args[0]) == 1 and len(outputs[0]) == len(columns):
            return [columns]
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if columns is not None and len(index) == 1 and type(index[0]) is int:
                return [columns]
            plain = all(type(i) is int or isinstance(i, slice) or i is Ellipsis for i in index)
            if sample_N is not None and plain and isinstance(index[0], slice):
                return [sample_N[index[0]]]
        elif sample_N is not None and func in _CUTTING and argument(args, kwargs, 2, "dim") in (0, None):
            return list(func(sample_N, *args[1:], **kwargs))
        return None

    def agreed(self, routed: list[Tensor]) -> Tensor | None:
        """Return the samples of the rows of all `routed` tensors; None if they differ."""
        first, *others = (self._traced[x].sample_N for x in routed)
        return first if all(other is first or torch.equal(first, other) for other in others) else None

    def _add(self, func: Function, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        if func is Tensor.__setitem__:
            base, rows, source = args[0], _row_numbers(args[1]), args[2]
        else:
            named = "src" if func in _SCATTERING else "source"
            base, rows, source = args[0], argument(args, kwargs, 2, "index"), argument(args, kwargs, 3, named)
            rows = _targets(func, rows) if argument(args, kwargs, 1, "dim") == 0 and rows is not None else None
        own = self.samples(source) if isinstance(source, Tensor) else None
        whole = func in _REPLACING and (func is not Tensor.__setitem__ or _is_of_whole_rows(args[1]))
        if own is not None and rows is not None and whole and _permutes(rows, len(base)):
            self._put(outputs, torch.empty_like(own).index_copy_(0, rows.to(own.device), own))
            return
        home = None if self.lost(base) or rows is None else self._of(base, 0, read=False)
        if home is None or own is None or rows is None or not torch.equal(home[rows], own):
            self.lose(outputs)
        else:
            self._put(outputs, self.samples(base))

    def _of(self, x: Tensor, dim: int, *, read: bool) -> Tensor | None:
        if x in self._traced:
            return self._along(x, dim)
        whole = x.dim() > dim and x.shape[dim] > 0 and x.shape[dim] % self.batch_size == 0
        return self._numbers(x, dim) if self.holds_samples(x, dim, read) and whole else None

    def _along(self, x: Tensor, dim: int) -> Tensor | None:
        traced = None if self.idle else self._traced.get(x)
        return None if traced is None or traced.dim != dim else traced.sample_N

    def _numbers(self, x: Tensor, dim: int = 0) -> Tensor:
        rows = x.shape[dim]
        return torch.arange(rows, device=x.device) // max(1, rows // self.batch_size)

    def _put(self, outputs: list[Tensor], sample_N: Tensor | None, dim: int = 0) -> None:
        for x in outputs:
            if sample_N is None:
                self._traced.pop(x, None)
            else:
                sample_N = sample_N.to(x.device)
                self._traced[x] = _Traced(sample_N, dim, dim == 0 or self.in_order(sample_N))
                self.idle = False

    def lose(self, outputs: list[Tensor]) -> None:
        """Mark the samples of rows as unknown."""
        for x in outputs:
            self._traced[x] = _Traced(None)
            self.idle = False
