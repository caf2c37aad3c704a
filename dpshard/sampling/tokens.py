"""Tokens on disk, read at random: a data set of sequences that may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpshard.config import is_count
from dpshard.errors import ConfigurationError, DataError

_META, _TOKENS, _STARTS, _DOCUMENTS = "store.json", "tokens.bin", "starts.bin", "documents.bin"


class TokenStore(Dataset[Tensor]):
    """A folder of tokens as a data set: item i is sequence i, int64 [length], filled with the padding id.

    A sequence has tokens of one document; `UnitDataset(store, store.documents, rows_per_unit=K)` makes units of whole
    documents. Raises DataError if the folder holds no whole store.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / _META).read_text("utf-8"))
            self.length, self.pad, self._dtype = int(meta["length"]), int(meta["pad"]), np.dtype(meta["dtype"])
            self._sequences, self._tokens = int(meta["sequences"]), int(meta["tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder} holds no token store ({error}): write one with TokenStore.write(folder, ...)."
            ) from error
        sizes = {_TOKENS: self._tokens * self._dtype.itemsize, _STARTS: 8 * (self._sequences + 1)}
        for name, size in (sizes | {_DOCUMENTS: 8 * self._sequences}).items():
            path = self.folder / name
            found = path.stat().st_size if path.exists() else -1
            if found != size:
                raise DataError(
                    f"{path} has {found} bytes instead of {size}: it was not written whole. Write it again."
                )

    @staticmethod
    def write(
        folder: str | Path, documents: Iterable[Sequence[int] | NDArray[Any]], *, length: int, vocabulary: int, pad: int
    ) -> TokenStore:
        """Write documents of token ids, cut into sequences of at most `length`; return the store.

        Raises ConfigurationError for bad sizes. Raises DataError for an id that is not in the vocabulary, and for a
        folder that holds a store.
        """
        if not (is_count(length) and is_count(vocabulary)) or not 0 <= pad < vocabulary:
            raise ConfigurationError(
                f"{length=!r}, {vocabulary=!r}, {pad=!r}: positive ints, and pad in the vocabulary."
            )
        folder, dtype = Path(folder), np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / _META).exists():
            raise DataError(f"{folder} holds a token store already: choose another folder.")
        end = sequences = 0
        with (
            (folder / _TOKENS).open("wb") as tokens,
            (folder / _STARTS).open("wb") as starts,
            (folder / _DOCUMENTS).open("wb") as owners,
        ):
            starts.write(np.int64(0).tobytes())
            for number, document in enumerate(documents):
                ids = np.asarray(document, dtype=np.int64)
                if ids.ndim != 1 or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
                    raise DataError(f"Document {number} is not a list of token ids from 0 to {vocabulary - 1}.")
                if not len(ids):
                    continue
                tokens.write(ids.astype(dtype).tobytes())
                ends = end + np.minimum(np.arange(length, len(ids) + length, length), len(ids)).astype(np.int64)
                starts.write(ends.tobytes())
                owners.write(np.full(len(ends), number, dtype=np.int64).tobytes())
                end, sequences = end + len(ids), sequences + len(ends)
        meta = {"length": length, "pad": pad, "dtype": dtype.name, "sequences": sequences, "tokens": end}
        (folder / _META).write_text(json.dumps(meta), "utf-8")  # last: a folder without it is no store
        return TokenStore(folder)

    @cached_property
    def _maps(self) -> tuple[NDArray[Any], NDArray[Any]]:
        if not self._sequences:
            return np.empty(0, self._dtype), np.zeros(1, np.int64)
        # Plain arrays: to slice a np.memmap makes another np.memmap, which takes longer than reading.
        return tuple(
            np.memmap(self.folder / name, dtype, "r").view(np.ndarray)
            for name, dtype in ((_TOKENS, self._dtype), (_STARTS, np.int64))
        )  # type: ignore[return-value]

    @cached_property
    def documents(self) -> NDArray[Any]:
        """Document of every sequence, int64 [sequences], mapped into memory."""
        return np.memmap(self.folder / _DOCUMENTS, np.int64, "r") if self._sequences else np.empty(0, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the maps, which pickle would read whole."""
        return {name: x for name, x in self.__dict__.items() if name not in ("_maps", "documents")}

    def __len__(self) -> int:
        return self._sequences

    def __getitem__(self, i: int) -> Tensor:
        """Return sequence i, int64 [length]; raise IndexError beyond the last."""
        return self.rows([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self.rows(indices))

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Return sequences, int64 [n, length]; raise IndexError beyond the last."""
        places = np.asarray(indices, dtype=np.int64)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < self._sequences:
            raise IndexError(f"{int(places.min())} to {int(places.max())} of {self._sequences} sequences")
        tokens, starts = self._maps
        ids = np.full((len(places), self.length), self.pad, np.int64)
        for row, start, end in zip(ids, starts[places].tolist(), starts[places + 1].tolist(), strict=True):
            row[: end - start] = tokens[start:end]
        return torch.from_numpy(ids)
