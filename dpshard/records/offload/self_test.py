"""Compare returned records with the originals, once on each GPU."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dpshard.records.offload.copies import Copies, Gpu

_ROUNDS, _RECORDS, _BYTES = 3, 12, 2**23
_IN_WINDOW = 2


@functools.cache
def needs_the_cpu(device: torch.device) -> bool:
    """Return True, and warn, if streams do not keep the waits of [Note: Offloaded records]."""
    with ThreadPoolExecutor(1) as thread:  # a new thread has no modes, streams or settings of the caller
        if thread.submit(returned_as_it_left, Gpu(device), _BYTES).result():
            return False
    warnings.warn(
        f"offload_records: records that returned to {device} differed from what had left, in a test before use. So "
        f"the CPU waits for every copy, and nothing overlaps. Please report this with the output of `dpshard doctor`.",
        stacklevel=2,
    )
    return True


def returned_as_it_left(gpu: Gpu, nbytes: int) -> bool:
    """Return True if all bytes return unchanged while the device computes."""
    copies, equal = Copies(gpu, window=_IN_WINDOW * nbytes), []
    with torch.inference_mode():
        load = torch.ones(min(2048, nbytes), min(2048, nbytes), device=gpu.device)
        for turn in range(_ROUNDS):
            away = []
            for i in range(_RECORDS):
                load = _busy(load)  # without its wait, the copy out would come too early
                away.append(copies.leave(_content(turn, i, nbytes, load)))
                _ = torch.full((nbytes,), 255, dtype=torch.uint8, device=gpu.device)  # uses freed memory
            for i, some in enumerate(away):
                for ahead in away[i : i + 1 + _IN_WINDOW]:
                    copies.begin_return(ahead)
                found = copies.fetch(some)[:nbytes]
                equal.append((found == _content(turn, i, nbytes, load)).all())
                load = _busy(load)
        copies.settle()
        return bool(torch.stack(equal).all())


def _content(turn: int, i: int, nbytes: int, load: Tensor) -> Tensor:
    """Return known bytes plus zero times `load`, which makes them wait for it."""
    zero = (load[0, 0] * 0).to(torch.uint8)
    return (torch.arange(nbytes, dtype=torch.int32, device=load.device) % (97 + _RECORDS * turn + i)).to(
        torch.uint8
    ) + zero


def _busy(load: Tensor) -> Tensor:
    return (load @ load) / len(load)  # ones stay ones
