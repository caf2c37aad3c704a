"""Facts that affect the rounding of a repeated step's sums, but are not part of the mechanism.

[Note: Facts of a run]
Other ranks, shards, micro-batch sizes, clipping modes or kernels round sums differently. Loading a state under other
facts warns; only the digest of the sums decides. Tensors in memory get a keyed digest of a few rows, and a Subset gets
one of its indices. The digest of a UnitDataset covers which rows form each unit. That of a ConcatDataset covers the
lengths of its parts. A digest reveals another data set, but not one changed row. Reading other data sets could open
files or draw random numbers.

Without Poisson sampling, the order of rows decides when a sample comes again. So other rows are refused after a
release. An index must mean the same sample on all ranks. So all ranks must have one digest, or none may have any.
"""

from __future__ import annotations

import hmac
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from dpshard.backends import Backend
from dpshard.config import SamplingName
from dpshard.errors import DataError
from dpshard.kernels import native, triton
from dpshard.randomness import RandomSource, derive_key
from dpshard.sampling.repeats import chosen_of_table
from dpshard.sampling.units import KeyedUnits

ROWS = 64
UNKNOWN = "00" * 32


class FactsOfRun:
    """The facts of this run and of the loaded state; see [Note: Facts of a run]."""

    def __init__(self, backend: Backend, clipping_mode: str, sampling: SamplingName = "poisson") -> None:
        self._backend, self._clipping_mode, self._sampling = backend, clipping_mode, sampling
        self._data: tuple[bytes, str] | None = None  # run secret, digest of the sampled data
        self._of_batches: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all known facts, as plain values."""
        backend = self._backend
        device = _described(backend.sharding.device)
        return {
            "device": device,
            "ranks": backend.data_ranks.world_size,
            "layout": backend.layout,
            "clipping_mode": self._clipping_mode,
            "torch": str(torch.__version__),
            "data": None if self._data is None else self._data[1],
            **self._of_batches,
        }

    def load_state_dict(self, saved: dict[str, Any], step: int, *, before: int = 0) -> None:
        """Store a loaded state's facts; warn if they differ, or the engine was at a later step `before`."""
        if step < before:
            warnings.warn(
                f"This engine was at step {before} of the run, and the state is of step {step}: releases of later "
                f"steps by another process are forgotten. Count them by load_state_dict(state, released=n), with n "
                f"steps released in all, {before} or more.",
                stacklevel=3,
            )
        self._saved, self._of_batches = saved, {}
        self._compare(step)

    def forget(self) -> None:
        """Forget the loaded facts, because all releases since then are known."""
        self._saved = {}

    def know_data(self, saved: dict[str, Any], secret: bytes) -> None:
        """Store the digest of the data of the run with this secret."""
        data = saved.get("data")
        if data is not None or (self._data is not None and self._data[0] != secret):
            self._data = None if data is None else (secret, data)

    def begin_batches(
        self, dataset: Any, micro_batch_size: int | None, secret: bytes, step: int, *, released: bool
    ) -> None:
        """Set the facts of the batches; all ranks call it.

        Raises DataError on all ranks if their rows differ. Where order matters, it does so for other rows after a
        release, too.
        """
        data = of_rows(dataset, secret)
        self._require_on_all_ranks(data)
        if data is not None:
            if self._sampling != "poisson" and released and self._data not in (None, (secret, data)):
                raise DataError(
                    f"These are other rows than before, or the same in another order. But sampling={self._sampling!r} "
                    f"depends on when a sample returns, and identifies it by its index. Pass the same rows in the same "
                    f"order to every engine.batches(...) of a run (the engine permutes them), and change samples at "
                    f"random in __getitem__."
                )
            self._data = secret, data
        self._of_batches = {"micro_batch_size": micro_batch_size or "all"}
        self._compare(step)

    def _require_on_all_ranks(self, data: str | None) -> None:
        ranks = self._backend.communicator
        if ranks.world_size == 1:
            return
        own = torch.tensor(list(bytes.fromhex(data or UNKNOWN)), dtype=torch.uint8, device="cpu")
        seen = {bytes(row).hex() for row in ranks.all_gather(own).tolist()}
        if self._backend.stages is not None:
            seen.discard(UNKNOWN)  # a pipeline stage between the first and the last reads no rows
        if len(seen) > 1:
            raise DataError(
                "Ranks passed different data sets to engine.batches(...), or the same samples in different orders. An "
                "index then names another sample on each rank, and one sample could take part on two ranks at once. "
                "Pass the whole data set on every rank, in one order: the engine gives each rank its share. Seed a "
                "random split or shuffle alike on every rank: random_split(data, sizes, "
                "generator=torch.Generator().manual_seed(0))."
            )

    def _compare(self, step: int) -> None:
        changed = list(_differences(self._saved, self.state_dict()))
        if not changed:
            return
        self._saved = {}  # warn once
        warnings.warn(
            f"The run that saved this state differs: {'; '.join(changed)}. So the sums of a repeated step may differ, "
            f"at least by rounding. Such a step gets independent noise, and is a second release. The ledger does not "
            f"contain the releases after the state was saved. If there are any, count them by load_state_dict(state, "
            f"released=n), with n releases in total. Without any, n={step}.",
            stacklevel=5,
        )


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}{' with Triton' if triton.run_on(device) else ''}"
    compiled = device.type == "cpu" and native.is_built()
    return f"{device.type}{' with compiled code' if compiled else ''}"


def of_rows(dataset: Any, secret: bytes) -> str | None:
    """Return a keyed digest of some rows in memory, or of their indices; None if neither is known.

    Units and concatenated data sets have the digests of what they read, and of how they group or join it.
    """
    if isinstance(dataset, IterableDataset) or not len(dataset):
        return None
    digest = hmac.new(derive_key(secret, "facts", "data"), digestmod="sha256")
    if isinstance(dataset, ConcatDataset | KeyedUnits):
        joins = isinstance(dataset, ConcatDataset)
        parts = [of_rows(part, secret) for part in (dataset.datasets if joins else [dataset.dataset])]
        grouping = str(dataset.cumulative_sizes).encode() if joins else dataset.grouping
        digest.update(f"parts {parts}".encode())
        digest.update(grouping)
        return digest.hexdigest() if len(grouping) or any(parts) else None
    words = RandomSource(derive_key(secret, "facts", "rows")).words(ROWS)
    rows, source = sorted({int(word) % len(dataset) for word in words}), dataset
    while (chosen := _chosen(source, rows)) is not None:
        rows, source = chosen
    if type(source) is not TensorDataset:
        inner = of_rows(source, secret) if isinstance(source, ConcatDataset | KeyedUnits) else None
        digest.update(f"indices {rows}{inner or ''}".encode())
        return None if source is dataset else digest.hexdigest()
    for tensor in source.tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape[1:])}".encode())
        digest.update(tensor[rows].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _chosen(dataset: Any, rows: list[int]) -> tuple[list[int], Any] | None:
    """Return the indices of these rows in an underlying data set, and that data set if known; None without indices."""
    if type(dataset) is Subset:
        return [int(dataset.indices[i]) for i in rows], dataset.dataset
    if (column := chosen_of_table(dataset)) is not None:
        # Hugging Face's own fingerprint would change with the times of files.
        return column.take(rows).to_pylist(), None
    return None


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(saved.keys() & now.keys()):
        if None not in (saved[name], now[name]) and saved[name] != now[name]:
            yield "other rows of data" if name == "data" else f"{name} {now[name]} (saved: {saved[name]})"
