"""Random reads of a TokenStore: a step's sequences, with and without the system's cache of the file."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from dpshard import TokenStore

LENGTH, VOCABULARY = 1024, 256_000


def measure(gib: float) -> dict[str, object]:
    """Write `gib` GiB of tokens, 4 bytes each, and read all sequences in random order; return GiB a second."""
    sequences = max(1, int(gib * 2**30) // (4 * LENGTH))
    generator = np.random.default_rng(0)
    document = generator.integers(1, VOCABULARY, 64 * LENGTH)
    documents = (document for _ in range(-(-sequences // 64)))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = TokenStore.write(Path(folder) / "store", documents, length=LENGTH, vocabulary=VOCABULARY, pad=0)
        figures: dict[str, object] = {"sequences": len(store), "write GiB/s": _rate(store, start)}
        file = os.open(Path(folder) / "store" / "tokens.bin", os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        for name in ("from the disk", "from the cache"):
            start = time.perf_counter()
            for i in generator.permutation(len(store)).tolist():
                store[i]
            figures[f"read {name}, GiB/s"] = _rate(store, start)
    return figures


def _rate(store: TokenStore, start: float) -> float:
    return round(len(store) * LENGTH * 4 / 2**30 / (time.perf_counter() - start), 3)
