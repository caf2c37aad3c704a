"""The tensors of a record: their bytes, and writes to them before its group was clipped."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from dpshard.errors import LogicalBatchError
from dpshard.records.record import Record

_names: dict[type[Record], list[str]] = {}


def versions(record: Record) -> int:
    """Return the sum of the versions of a record's tensors; every write that torch counts raises it."""
    return sum([x._version for x in _tensors_of(record)])


def nbytes_of(record: Record) -> int:
    """Return the bytes of a record's tensors."""
    return sum([x.nbytes for x in _tensors_of(record)])


def _tensors_of(record: Record) -> list[Tensor]:
    kind = type(record)
    if kind not in _names:
        _names[kind] = [field.name for field in fields(kind)]
    found = (getattr(record, name) for name in _names[kind])
    return [x for x in found if isinstance(x, Tensor)]


def changed(name: str, *, measured: bool = True) -> LogicalBatchError:
    """Return the error to raise if a record of a parameter was written during backward, after its norm or before."""
    when = (
        "after its norm was measured: the sample would count more than its clipped gradient"
        if measured
        else "while it waited for its norm: the sample would count with another gradient"
    )
    return LogicalBatchError(
        f"A gradient or an input that {name} was used with was changed in place during backward, {when}. Let the "
        f"autograd.Function or the hook that writes it return a new tensor, or choose a clipping_mode of two passes."
    )
