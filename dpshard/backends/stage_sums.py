"""The clipped sums of a pipeline's stage.

[Note: Sums of a stage] Groups on several stages are clipped only after all backwards of a micro-batch; DDP and FSDP2
reduce earlier. So the engine sums replicas once in a logical batch. It sums shards after each step of the schedule,
because whole sums take memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpshard.backends.collectives import sum_in_place
from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.local import DirectReduction
from dpshard.backends.roles import Take
from dpshard.backends.sharding import Unsharded
from dpshard.errors import DpshardError, LogicalBatchError, UnsupportedParameterError
from dpshard.records import WIDE, as_real


class LateSums(ABC):
    """A Reduction that also takes sums after backward."""

    _store: DotGradStore
    _late_fault: DpshardError | None = None

    def begin_late(self) -> None:
        """Compare earlier sums with their checksums, which later sums replace."""
        try:
            self._store.compare_bits()
        except LogicalBatchError as error:
            self._late_fault = error

    @abstractmethod
    def add(self, names: Sequence[str], take: Take) -> None:
        """Take clipped sums."""

    @abstractmethod
    def end_micro_batch(self) -> None:
        """End a micro-batch; the data ranks call it together."""

    def add_later(self, names: Sequence[str], take: Take) -> None:
        """Take sums after backward. `fault` returns an error later, so that all ranks raise."""
        try:
            self.add(names, take)
        except (LogicalBatchError, UnsupportedParameterError) as error:
            self._late_fault = error

    def forget_fault(self) -> None:
        """Forget the error of `add_later`, because the sums were dropped. Until then it forbids a release."""
        self._late_fault = None


class WholeSums(DirectReduction, LateSums):
    """Sums of whole parameters, over replicas on the `data` ranks."""

    def __init__(self, sharding: Unsharded, store: DotGradStore, data: Communicator) -> None:
        super().__init__(store)
        self._sharding, self._data = sharding, data
        self._is_summed = False

    @property
    def is_unsummed(self) -> bool:
        """True if there are replicas."""
        return self._data.world_size > 1

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return an empty context."""
        self._is_summed = False
        return super().micro_batch(last=last)

    def add(self, names: Sequence[str], take: Take) -> None:
        """Add this replica's sums; raise LogicalBatchError after `sum_rest`."""
        if self._is_summed:
            raise LogicalBatchError(
                "A backward came after its logical batch was summed over the replicas of the stage. Call "
                "schedule.step(...) within the loop over engine.batches(...), and zero_grad() to start afresh."
            )
        super().add(names, take)

    def end_micro_batch(self) -> None:
        """Do nothing."""

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        return self._late_fault or super().fault()

    def sum_rest(self) -> None:
        """Sum over the replicas, once."""
        if self._is_summed or self._data.group is None:
            return
        trained = {name: p for name, p in self._sharding.parameters.items() if p.requires_grad}
        with torch.no_grad():
            sum_in_place([self._sum_of(name, p) for name, p in trained.items()], self._data.group)
            self._sharding.guard.note_all(trained)
        self._is_summed = True

    def _sum_of(self, name: str, parameter: Tensor) -> Tensor:
        """Return a parameter's sum, also zeros: other replicas may have a gradient."""
        self._store.stand_in(name)
        if parameter.dtype in WIDE:
            assert parameter.grad is not None
            return as_real(parameter.grad)
        return self._store.wide_sums.setdefault(name, torch.zeros_like(parameter, dtype=torch.float32))

    def whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """Digest [L] of the sums; raise LogicalBatchError if replicas differ."""
        if bool((ranks_WL != ranks_WL[0]).any()):
            raise LogicalBatchError(
                "The clipped sums of this logical batch differ between the replicas of a pipeline, so the replicas "
                "would drift apart. Run the same schedule on all ranks, and make the engine for the "
                "DistributedDataParallel of each stage. Call zero_grad() to start afresh."
            )
        return ranks_WL[0]


class SilentReducer:
    """Replaces the reducer of a stage in DDP, which would reduce too early."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self._reducer = model, model.reducer
        model.reducer = self  # type: ignore[assignment]

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """Do not begin a reduction."""

    def restore(self) -> None:
        """Let DistributedDataParallel reduce again."""
        self._model.reducer = self._reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
