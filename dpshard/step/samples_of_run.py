"""Check the samples of a run's batches.

In a fixed order, content identifies samples of streams and own loops, an index all others ([Note: Participation] in
sampling/participation.py). So a run keeps one kind of source: another could repeat samples too early.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dpshard.accounting.mechanism import Mechanism
from dpshard.backends.communicator import Communicator
from dpshard.errors import CheckpointError, DataError
from dpshard.interception import OwnLoopRows
from dpshard.sampling import (
    MicroBatchPlan,
    Packing,
    Participation,
    Sampler,
    Stream,
    fingerprints,
    load,
    load_stream,
    packer,
    plan_micro_batches,
    plan_steps,
    sampler_of,
    warn_of_repeats,
)
from dpshard.step.refusals import refuse_own_loop

SOURCES = ("indices", "stream", "loop")


class SamplesOfRun:
    """The samples of a run; in a fixed order, it checks which take part."""

    def __init__(self, mechanism: Mechanism, ranks: Communicator) -> None:
        self._mechanism, self._ranks = mechanism, ranks
        self._batch_size = mechanism.schedule[0]
        fixed = mechanism.sampling == "fixed-order"
        self._taken = Participation(mechanism.sample_size, mechanism.sample_size // self._batch_size) if fixed else None
        self._source: str | None = None
        self.fed = OwnLoopRows() if fixed else None
        """Rows of an own loop, in a fixed order."""
        self._begun = False

    def load(
        self,
        dataset: Any,
        begin: Callable[[], tuple[bytes, range]],
        micro_batch_size: int | None,
        *,
        pad: bool,
        packing: Packing | None,
        **reading: Any,
    ) -> Iterator[tuple[MicroBatchPlan, Any]]:
        """Return this rank's micro-batches. `begin`, called at the first one, returns run secret and steps.

        `reading` holds the loader's options. Raise DataError, at once, for unsuitable data.
        """
        if isinstance(dataset, IterableDataset):
            if packing is not None:
                raise DataError("packing= reads any document by its index, but a stream has one order. Leave it out.")
            return self._stream(dataset, begin, micro_batch_size, pad=pad, **reading)
        mechanism = self._mechanism
        warn_of_repeats(dataset)
        facts = {"sample_size": mechanism.sample_size, "rows_per_unit": mechanism.rows_per_unit}
        plans = self._plans(begin, micro_batch_size, pad=pad, pack=packer(dataset, packing))
        return load(dataset, plans, packed=packing is not None, **facts, **reading)

    def _plans(
        self, begin: Callable[[], tuple[bytes, range]], micro_batch_size: int | None, **how: Any
    ) -> Iterator[MicroBatchPlan]:
        secret, steps = begin()
        self._warn_of_end(steps)
        if self._taken is not None:
            self._taken.drop()
            self._require("indices")
        ranks = {"rank": self._ranks.rank, "world_size": self._ranks.world_size}
        of_units = {"rows_per_unit": self._mechanism.rows_per_unit}
        yield from plan_steps(self.sampler(secret), secret, steps, micro_batch_size, **ranks, **of_units, **how)

    def sampler(self, secret: bytes) -> Sampler:
        """Return the sampler of the run."""
        run, correlation = self._mechanism, self._mechanism.noise_correlation
        bands = None if correlation is None else correlation.bands
        rules = {"max_batch_size": run.max_batch_size, "bands": bands}
        return sampler_of(run.sampling, run.sample_size, run.schedule, secret, **rules)

    def _warn_of_end(self, steps: range) -> None:
        if self._begun and not steps:  # a finished run that resumes has no epochs to loop over
            warnings.warn(
                f"engine.batches() yields nothing, because all {steps.stop} steps of the run are taken. One call "
                f"yields all epochs: leave out the loop over epochs.",
                stacklevel=2,
            )
        self._begun = True

    def _stream(
        self,
        stream: IterableDataset[Any],
        begin: Callable[[], tuple[bytes, range]],
        micro_batch_size: int | None,
        *,
        pad: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
        **reading: Any,
    ) -> Iterator[tuple[MicroBatchPlan, Any]]:
        if self._taken is None:
            raise DataError(
                f"{type(stream).__name__} is an IterableDataset, which can only be read in its own order, and "
                f"sampling={self._mechanism.sampling!r} draws samples by their index. Make the engine with "
                f"sampling='fixed-order', or wrap the data in a class with __getitem__ and __len__."
            )
        if pin_memory:
            raise DataError("pin_memory=True pins what workers collate, but a stream is collated here. Leave it out.")
        K = self._mechanism.rows_per_unit
        read = Stream(stream, self._mechanism.sample_size, self._batch_size, **reading)

        def plan(step: int, samples: list[Any]) -> list[MicroBatchPlan]:
            self._begin_streamed(step, samples)
            size = micro_batch_size or math.ceil(len(samples) / self._ranks.world_size)
            ranks = self._ranks.rank, self._ranks.world_size
            return plan_micro_batches(range(len(samples)), step, size, *ranks, pad=pad, rows_per_unit=K)

        def loaded() -> Iterator[tuple[MicroBatchPlan, Any]]:
            _, steps = begin()
            self._warn_of_end(steps)
            batches = zip(steps, read.batches(steps.start), strict=False)
            yield from load_stream(batches, plan, rows_per_unit=K, collate_fn=collate_fn)

        return loaded()

    def _begin_streamed(self, step: int, samples: list[Any]) -> None:
        assert self._taken is not None
        batch = fingerprints(samples)
        if self._ranks.world_size > 1 and self._ranks.mismatches({"samples": batch.tobytes()}):
            raise DataError(
                f"Step {step + 1}: ranks read different samples from the stream, so a sample could take part on two "
                f"ranks. Pass the whole stream on every rank, in one order: the engine divides each logical batch."
            )
        self._require("stream")
        self._taken.begin(step, batch)

    def begin_release(self, step: int, *, own: bool) -> None:
        """Check the samples of the logical batch; `own`: the script fed it.

        Raise LogicalBatchError for a loop that cannot be accounted for. Raise DataError for a wrong batch size, or a
        sample that comes too early.
        """
        if own:
            refuse_own_loop(self._mechanism.sampling)
        if self.fed is None or self._taken is None or not own:
            return
        self._require("loop")
        batch_X = self._over_ranks(self.fed.fingerprints())
        allowed = {self._batch_size, self._mechanism.sample_size % self._batch_size or self._batch_size}
        if len(batch_X) not in allowed:
            raise DataError(
                f"Step {step + 1} got {len(batch_X)} samples over all ranks, but the noise was planned for "
                f"batch_size={self._batch_size}. Call optimizer.step() after {self._batch_size} samples (only the last "
                f"batch of an epoch may have the {self._mechanism.sample_size % self._batch_size} that remain)."
            )
        self._taken.begin(step, batch_X.cpu().numpy())

    def _over_ranks(self, fed_X: torch.Tensor) -> torch.Tensor:
        if self._ranks.world_size == 1:
            return fed_X
        counts = self._ranks.all_gather(torch.tensor([len(fed_X)])).flatten().tolist()
        padded = torch.zeros(max(counts), dtype=torch.int64)
        padded[: len(fed_X)] = fed_X.cpu()
        rows = self._ranks.all_gather(padded).cpu()
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    def end_release(self, step: int, *, own: bool) -> None:
        """Record that the samples of a step took part."""
        if self._taken is None or self.fed is None:
            return
        self._source = self._source or ("loop" if own else "stream" if self._taken.begun else "indices")
        self._taken.end(step)
        self.fed.clear()

    def _require(self, source: str) -> None:
        if self._source not in (None, source):
            kinds = {"indices": "a map-style data set", "stream": "a stream", "loop": "a loop of your own"}
            raise DataError(
                f"This run took its samples from {kinds[self._source]} so far, and now from {kinds[source]}: it is "
                f"unknown which of them came before. Continue it as it began, or start a new run."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Return source and participation, in a fixed order."""
        return None if self._taken is None else {"source": self._source, "taken": self._taken.state_dict()}

    def require_saved_order(self, state: Any, step: int) -> None:
        """Raise CheckpointError unless `state` says which samples took part before `step`."""
        if self._taken is None:
            return
        source = state.get("source") if isinstance(state, dict) else None
        if not isinstance(state, dict) or source not in ((None, *SOURCES) if step == 0 else SOURCES):
            raise CheckpointError(
                f"The checkpoint does not say which samples took part before step {step + 1}, so one might come too "
                f"early. Resume from another checkpoint."
            )
        Participation(1, 1).load_state_dict(state.get("taken"))

    def load_state_dict(self, state: Any) -> None:
        """Load a checked `state_dict()`."""
        if self._taken is not None and self.fed is not None:
            self._source = state["source"]
            self._taken.load_state_dict(state.get("taken"))
            self.fed.clear()
