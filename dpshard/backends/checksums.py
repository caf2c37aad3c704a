"""Checksums of gradient bits, in few operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpshard.kernels import native
from dpshard.records import as_real, checksum
from dpshard.records.numerics import index_tensor

_SMALL = 2**14
_TOGETHER = 2**20


def checksums(tensors: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    """Names of `tensors` and their checksums, int64 [N], on the device of the first.

    Checksums do not depend on other tensors. Equal names, shapes and dtypes give an equal order.
    """
    values = list(tensors.values())
    quick = tensors if native.supports_sums(values) else {n: x for n, x in tensors.items() if native.supports_sums([x])}
    names, found = list(quick), []
    if quick:
        found = [native.checksums([as_real(x) if x.is_complex() else x for x in quick.values()])]
        if quick is tensors:
            return names, found[0]
    device = values[0].device
    rest = {name: x for name, x in tensors.items() if name not in quick}
    for batch in _batches(rest):
        parts = [as_real(tensors[name].detach()) for name in batch]
        names += batch
        found.append(_of_small(parts) if _is_small(tensors[batch[0]]) else checksum(parts[0])[None])
    found = [part.to(device) for part in found]
    return names, found[0] if len(found) == 1 else torch.cat(found)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    open_batches: dict[tuple[torch.device, torch.dtype], tuple[list[str], int]] = {}
    for name, x in tensors.items():
        if not _is_small(x):
            yield [name]
            continue
        n = x.numel()
        kind = x.device, x.dtype
        batch, total = open_batches.pop(kind, ([], 0))
        batch.append(name)
        if total + n > _TOGETHER:
            yield batch
        else:
            open_batches[kind] = batch, total + n
    yield from (batch for batch, _ in open_batches.values())


def _is_small(x: Tensor) -> bool:
    return 0 < x.numel() <= _SMALL


def _of_small(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of w + w^2 over the words w of each tensor."""
    first = tensors[0]
    word = torch.int16 if first.itemsize == 2 else torch.int32
    words = torch.cat([first.new_zeros(1), *(x.reshape(-1) for x in tensors)]).view(word).long()
    words_a_number = first.itemsize // word.itemsize
    lengths = (x.numel() * words_a_number for x in tensors)
    ends = index_tensor(tuple(itertools.accumulate(lengths, initial=words_a_number - 1)), words)
    sums = torch.addcmul(words, words, words).cumsum(0).index_select(0, ends)
    return sums[1:] - sums[:-1]
