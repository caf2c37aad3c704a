"""Joins small records of several parameters, because their calls cost more than their arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from dpshard.records.host import is_at_hand
from dpshard.records.numerics import accum_dtype, flat
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.record import Record

Small = PerSampleGrad | OuterProduct

_SMALL_PRODUCT = {"cpu": 2**17, "cuda": 2**21}
"""Most bytes of a small product with its sum: copying it costs less than calls."""
_TOGETHER = 2**5
"""Most bytes of a bundle, as a multiple of the largest small product's."""

_FEW = 2
"""Number of small records on a CPU up to which joining does not pay."""


def is_small(record: Record) -> TypeGuard[Small]:
    """Return True if the record's calls cost more than its arithmetic."""
    if isinstance(record, OuterProduct):
        return _nbytes(record) <= small_bytes(record.rows.device)
    return isinstance(record, PerSampleGrad) and record.is_small


def pays_to_join(records: Mapping[str, Small]) -> bool:
    """Return True unless joining takes longer."""
    tensors = [record.rows if isinstance(record, OuterProduct) else record.gradient for record in records.values()]
    return len(tensors) > _FEW or not all(map(is_at_hand, tensors))


@dataclass(frozen=True, slots=True)
class Bundle:
    """Concatenated gradients of several parameters."""

    record: Record
    """Gradients joined along their elements, or products joined as groups of one product."""
    shapes: Mapping[str, torch.Size]
    """Shapes by parameter, in order."""

    def clipped_sums(self, sum_weight_B: Tensor) -> dict[str, Tensor]:
        """Clipped sums by parameter."""
        total = self.record.clipped_sum(sum_weight_B).view(-1)
        sizes = [shape.numel() for shape in self.shapes.values()]
        # Copies, because each becomes a gradient of its own.
        parts: Sequence[Tensor] = [total] if len(sizes) == 1 else torch.split_with_sizes_copy(total, sizes)  # type: ignore[assignment]
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def without(self, nonfinite_B: Tensor) -> Bundle:
        """Zero the samples `nonfinite_B`."""
        return replace(self, record=self.record.without(nonfinite_B))


def bundles(records: Mapping[str, Small]) -> Iterator[Bundle]:
    """Join all gradients, and products of equal sizes."""
    gradients = {name: record for name, record in records.items() if isinstance(record, PerSampleGrad)}
    if gradients:
        shapes = {name: record.gradient.shape[1:] for name, record in gradients.items()}
        rows = [flat(record.gradient) for record in gradients.values()]
        yield Bundle(PerSampleGrad(_joined(rows, 1)), shapes)
    alike: dict[object, dict[str, OuterProduct]] = {}
    for name, record in records.items():
        if isinstance(record, OuterProduct):
            sizes = record.rows.shape, record.cols.shape, record.rows.dtype, record.cols.dtype, record.rows.device
            alike.setdefault(sizes, {})[name] = record
    for products in alike.values():
        for some in _batches(products):
            yield _of_products(some)


def _of_products(products: Mapping[str, OuterProduct]) -> Bundle:
    """Join weights [G, R, C] as one [n * G, R, C]."""
    shapes = {name: record.shape for name, record in products.items()}
    # By group, then by sample, as the clipped sum multiplies.
    rows, cols = (
        _joined([x.transpose(0, 1) for x in parts], 0).transpose(0, 1)
        for parts in zip(*[(record.rows, record.cols) for record in products.values()], strict=True)
    )
    return Bundle(OuterProduct(rows, cols, torch.Size((rows.shape[1], rows.shape[3], cols.shape[3]))), shapes)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _batches(products: Mapping[str, OuterProduct]) -> Iterable[dict[str, OuterProduct]]:
    first = next(iter(products.values()))
    most = _TOGETHER * small_bytes(first.rows.device) // max(1, _nbytes(first))
    items = [*products.items()]
    return (dict(items[i : i + most]) for i in range(0, len(items), most))


def _nbytes(product: OuterProduct) -> int:
    rows, cols = product.rows, product.cols
    return rows.nbytes + cols.nbytes + rows.shape[1] * rows.shape[3] * cols.shape[3] * accum_dtype(rows).itemsize


def small_bytes(device: torch.device) -> int:
    """Return the most bytes of a small product with its sum."""
    return _SMALL_PRODUCT.get(device.type, 0)
