"""Read logical batches from a stream in its own order, which every epoch repeats.

Step t takes the next B samples of a stream that begins anew after N ([Note: A cyclic order] in orders.py). Its length
is checked at its end, its order at every step ([Note: Participation] in participation.py). Every rank reads the whole
stream, and takes its slice. A resumed run skips to its place in the epoch.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dpshard.errors import DataError
from dpshard.sampling.loading import as_is
from dpshard.sampling.participation import Fingerprints


def require_stream(stream: Any, num_workers: int) -> None:
    """Raise DataError unless `num_workers` processes read each sample of `stream` once, in order."""
    if num_workers > 1:
        raise DataError(
            f"num_workers={num_workers}: each worker would read the whole stream ({type(stream).__name__}), or a part "
            f"of it in an order that depends on their number. Take num_workers=1, which reads ahead."
        )


class Stream:
    """The logical batches of a stream, from any step on."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        sample_size: int,
        batch_size: int,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        require_stream(stream, num_workers)
        self._kind, self._sample_size, self._batch_size = type(stream).__name__, sample_size, batch_size
        self._loader = DataLoader(
            stream,
            batch_size=None,
            collate_fn=as_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
        )

    def batches(self, first_step: int) -> Iterator[list[Any]]:
        """Yield the samples [B] of `first_step` and later ones; raise DataError for an epoch of another size."""
        samples = self._samples(first_step * self._batch_size)
        while True:
            yield list(islice(samples, self._batch_size))

    def _samples(self, first: int) -> Iterator[Any]:
        """Yield sample `first` and all later ones of the endless repetition."""
        place = first % self._sample_size
        while True:
            epoch = iter(self._loader)
            skipped = sum(1 for _ in islice(epoch, place))
            read = skipped
            for sample in islice(epoch, self._sample_size - place):
                read += 1
                if read == self._sample_size and next(epoch, _END) is not _END:
                    raise DataError(self._wrong_length("more samples than"))
                yield sample
            if read < self._sample_size:
                raise DataError(self._wrong_length(f"{read} samples instead of"))
            place = 0

    def _wrong_length(self, found: str) -> str:
        return (
            f"An epoch of the stream ({self._kind}) has {found} sample_size={self._sample_size}, for which the privacy "
            f"guarantee was computed. Pass the right sample_size to a new engine, and make sure that every epoch of "
            f"the stream has the same samples in the same order."
        )


_END = object()


def fingerprints(samples: list[Any]) -> Fingerprints:
    """Return a hash of the content of each sample, int64 [n]; raise DataError for one that cannot be read."""
    return np.array([_fingerprint(sample) for sample in samples], np.int64)


def _fingerprint(sample: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(sample):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _parts(x: Any) -> Iterator[bytes]:
    """Yield bytes that determine the content of `x`."""
    if isinstance(x, Tensor):
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        yield f"tensor {x.dtype} {tuple(x.shape)}".encode()
        yield x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(x, np.ndarray) and not x.dtype.hasobject:
        yield f"array {x.dtype.str} {x.shape}".encode()
        yield x.tobytes()
    elif isinstance(x, Mapping):
        yield f"mapping {len(x)}".encode()
        for key, value in x.items():
            yield from _parts(key)
            yield from _parts(value)
    elif isinstance(x, list | tuple):
        yield f"sequence {len(x)}".encode()
        for item in x:
            yield from _parts(item)
    else:
        try:
            yield pickle.dumps(x, 5)
        except Exception as error:
            raise DataError(
                f"A sample of the stream holds a {type(x).__name__}, which cannot be told from others ({error}). Yield "
                f"tensors, arrays, numbers, strings, and lists or dicts of them."
            ) from error
