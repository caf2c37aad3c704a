"""The tensors of a record: their bytes, and writes to them."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from dpshard.errors import LogicalBatchError
from dpshard.records.record import Record

_names: dict[type[Record], list[str]] = {}


def versions(record: Record) -> int:
    """Return the sum of the versions of a record's tensors."""
    return _sum_of(record, "_version")


def nbytes_of(record: Record) -> int:
    """Return the bytes of a record's tensors."""
    return _sum_of(record, "nbytes")


def _sum_of(record: Record, attribute: str) -> int:
    kind = type(record)
    if kind not in _names:
        _names[kind] = [field.name for field in fields(kind)]
    total = 0
    for name in _names[kind]:  # a comprehension would be a call
        x = getattr(record, name)
        if isinstance(x, Tensor):
            total += getattr(x, attribute)
    return total


def changed_in_backward(name: str, *, measured: bool = True) -> LogicalBatchError:
    """Return the error for a record written during backward."""
    when = (
        "after its norm was measured: the sample would count more than its clipped gradient"
        if measured
        else "while it waited for its norm: the sample would count with another gradient"
    )
    return LogicalBatchError(
        f"A gradient or an input that {name} was used with was changed in place during backward, {when}. {_NEW_TENSOR}"
    )


_NEW_TENSOR = "Let the autograd.Function or the hook that writes it return a new tensor."


def changed_between_passes() -> LogicalBatchError:
    """Return the error for an output gradient written between two passes."""
    return LogicalBatchError(
        f"The gradient of the model's output was changed in place during backward, and this clipping_mode runs "
        f"backward twice. The norms and the sums would be those of different gradients. {_NEW_TENSOR}"
    )
