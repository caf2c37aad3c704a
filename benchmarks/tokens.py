"""Random reads of a TokenStore: a step's sequences, with and without the system's cache of the file."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from dpshard import TokenStore

LENGTH, VOCABULARY, BATCH = 1024, 256_000, 256
STEP = 2.0
"""GiB of a step of VaultGemma: 517,989 sequences of 1,024 tokens of 4 bytes."""


def measure(gib: float, *, rounds: int = 3) -> dict[str, object]:
    """Write `gib` GiB of tokens, 4 bytes each, and read all sequences in random order; return GiB a second."""
    sequences = max(1, int(gib * 2**30) // (4 * LENGTH))
    generator = np.random.default_rng(0)
    document = generator.integers(1, VOCABULARY, 64 * LENGTH)
    documents = (document for _ in range(-(-sequences // 64)))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = TokenStore.write(Path(folder) / "store", documents, length=LENGTH, vocabulary=VOCABULARY, pad=0)
        figures: dict[str, object] = {"sequences": len(store), "gib": gib, "write": _rate(store, start), "rows": []}
        rates: dict[tuple[str, int], list[float]] = {}
        for _, workers, source in itertools.product(range(rounds), (0, 2), ("disk", "cache")):
            if source == "disk":
                _forget(Path(folder) / "store" / "tokens.bin")
            start = time.perf_counter()
            for _ in _batches(store, generator, workers):
                pass
            rates.setdefault((source, workers), []).append(_rate(store, start))
        figures["rows"] = [
            {"source": source, "workers": workers, "gib_per_s": (rate := statistics.median(all_rates))}
            | {"seconds_per_step": round(STEP / rate, 2)}
            for (source, workers), all_rates in rates.items()
        ]
    return figures


def _batches(store: TokenStore, generator: np.random.Generator, workers: int) -> Iterator[object]:
    order = generator.permutation(len(store)).tolist()
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    # As `engine.batches` reads them.
    rows = _Rows(store)
    return iter(DataLoader(rows, batch_sampler=batches, collate_fn=_as_is, num_workers=workers))  # type: ignore[arg-type]


class _Rows:
    def __init__(self, store: TokenStore):
        self._store = store

    def __getitems__(self, indices: list[int]) -> object:
        return self._store.rows(indices)


def _as_is(batch: object) -> object:
    return batch


def _forget(path: Path) -> None:
    """Drop a file from the system's cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def _rate(store: TokenStore, start: float) -> float:
    return round(len(store) * LENGTH * 4 / 2**30 / (time.perf_counter() - start), 3)
