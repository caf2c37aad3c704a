"""Collects the clipped sums of logical batches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpshard.backends import Backend, processes, refuse_later_group, updated_early
from dpshard.clipping.functions import ClippingFunction
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.metrics import BatchMetrics
from dpshard.clipping.tape import ClippedSums, Clipper, Roots, Tape
from dpshard.config import Execution
from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.interception import Copies, Doubt, Doubts, OwnLoopRows, RowIdentity
from dpshard.noise.keyed import SumShard
from dpshard.records import Owners
from dpshard.sampling import MicroBatchPlan, PackedTokens, packed_tokens
from dpshard.step import refusals
from dpshard.step.first_gradients import FirstGradients
from dpshard.step.logical_batch import TICKS, BatchState, Feed, Loaded, LogicalBatch, MicroBatch
from dpshard.step.other_engines import LOOPING, refuse_other_loop
from dpshard.step.pipeline import InStages
from dpshard.step.silence import Silence
from dpshard.step.spread import RowWatch, row_watches


class Collector:
    """The logical batch in progress, from its first forward to its release.

    Raises LogicalBatchError for uses that would count a sample twice, in another step, or not at all. `mean`: losses
    are means over rows. `rows_per_unit`: number of rows of a sample, whose loss is their mean. `fed` gets the rows of
    an own loop.
    """

    def __init__(
        self,
        backend: Backend,
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        *,
        mean: bool,
        rows_per_unit: int = 1,
        fed: OwnLoopRows | None = None,
    ) -> None:
        self.state = BatchState.EMPTY
        self.batch: LogicalBatch | None = None
        """None in a user's own loop."""
        self.metrics = BatchMetrics()
        self.two_passes = execution.backward_passes == 2
        sharding = backend.sharding
        roots = Roots(sharding.shapes_in_forward, sharding.anchored, sharding.values, sharding.meeting)
        groups, spanning = backend.own_groups(groups)
        at_once = backend.stages is None and sharding.is_one_call
        self.clipper = Clipper(roots, groups, function, execution, self, at_once=at_once, spanning=spanning)
        self._stages = None if backend.stages is None else InStages(backend, backend.stages, self.clipper)
        self._backend = backend
        self._device = backend.sharding.device
        self._mean, self._rows_per_unit, self._fed = mean, rows_per_unit, fed
        self._loop: Feed | None = None  # of the running loop over `batches`
        self._own_packed: PackedTokens | None = None
        self._own: list[Tape] = []  # since the last release
        self._silence = Silence()
        self._begin_doubts()
        self._own_loop_warned, self._tick = False, next(TICKS)
        self._first_gradients = FirstGradients(sharding.parameters, [name for name, *_ in sharding.everywhere])
        self._process, self._processes = os.getpid(), processes()
        self._completed: BatchMetrics | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the tapes and logical batches that are valid; see BatchState."""
        return self.clipper.epoch

    # --- forward and backward

    @property
    def plan(self) -> MicroBatchPlan | None:
        """Plan of the current micro-batch; None in a user's own loop."""
        micro = self._micro
        return None if micro is None else micro.plan

    @property
    def _micro(self) -> MicroBatch | None:
        micro = None if self.batch is None else self.batch.micro
        return micro if self._stages is None else self._stages.part_of(micro)

    @property
    def rows(self) -> RowIdentity | OwnLoopRows | None:
        """The check of the rows of the running forward, if any."""
        micro = self._micro
        if micro is None:
            if self._fed is not None and self._own_packed is not None:
                raise LogicalBatchError(refusals.PACKED_IN_ORDER)
            return self._fed
        if micro.plan.placement is not None or (self._stages is not None and not self._stages.sees_data):
            return None
        return micro.identity(self._doubts, mean=self._mean)

    @property
    def packed(self) -> PackedTokens | None:
        """The units of packed rows, if any."""
        micro = self._micro
        if micro is None:
            return self._own_packed
        if micro.packed is None and micro.plan.placement is not None:
            micro.packed = packed_tokens(micro.data, micro.plan)
        return micro.packed

    @contextmanager
    def own_packed(self, packed: PackedTokens, *, verified: bool) -> Iterator[None]:
        """Treat the forwards of an own loop as forwards on packed rows."""
        if not verified or self._rows_per_unit > 1:
            raise ConfigurationError(refusals.PACKED_UNVERIFIED)
        if self.batch is not None:
            raise LogicalBatchError(refusals.PACKED_TWICE)
        before, self._own_packed = self._own_packed, packed
        try:
            yield
        finally:
            self._own_packed = before

    def forward(self, module: nn.Module) -> AbstractContextManager[bool]:
        """Return a context for a forward; it yields False outside of training."""
        return nullcontext(True) if self._stages is None else self._stages.forward(module, self.batch)

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """Return the tape of a forward; raise LogicalBatchError if the forward is out of place."""
        refusals.refuse_fork(self._process)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise LogicalBatchError(refusals.CAPTURED)
        if self.clipper.pending:
            self.clipper.abort()  # records of a backward that raised
        if self.state is not BatchState.COLLECTING:
            refuse_later_group(self._processes)
            self._backend.sharding.refuse_changed_parameters()
            self._backend.sharding.writes.note()
        # Zeros, too: the sums of a step belong to one model.
        elif written := self._backend.sharding.writes.counted_write():
            self.begin_anew()
            raise LogicalBatchError(updated_early(written))
        # A mean over all rows is a mean of the samples' means. In a sum, a sample has the sum of its rows.
        scale = float(batch_size) if self._mean else 1.0 / self._rows_per_unit
        micro, packed, owners, is_padding_B = self._micro, self.packed, None, None
        if packed is not None:
            if self._backend.sharding.parts is not None:
                raise ConfigurationError(refusals.PACKED_IN_PARTS)
            scale = float(packed.units) if self._mean else 1.0
            owners = Owners(packed.owners(self._device), packed.units)
            is_padding_B = packed.is_padding.to(self._device)
        if micro is None:
            self._require_own_loop(module)
            tape = Tape(self.clipper, batch_size, is_padding_B, scale, owners)
            self._watched += row_watches(packed, is_padding_B)
            self._own = [*(earlier for earlier in self._own if earlier.unfinished), tape]
        else:
            if micro.tape is None:
                is_padding_B = micro.plan.is_padding_on(self._device)
                micro.tape = Tape(self.clipper, batch_size, is_padding_B, scale, owners)
                self._watched += row_watches(packed, is_padding_B)
                if self._stages is not None:  # other stages may have dropout
                    self._stages.note(micro.plan)
                elif micro.rows is not None and micro.rows.copies is not None:
                    self._watched.append((is_padding_B, micro.rows.copies))
            tape = micro.tape
            if tape.aborted:
                raise LogicalBatchError(refusals.AFTER_FAILED_BACKWARD)
        tape.forwards.begin()
        return tape

    def _require_own_loop(self, module: nn.Module) -> None:
        if self.batch is not None or self._loop is not None:
            raise LogicalBatchError(refusals.BETWEEN_BATCHES)
        if LOOPING:
            refuse_other_loop(self._tick)
        parts = self._backend.sharding.parts
        if parts is not None and parts.in_terms:
            raise LogicalBatchError(refusals.OWN_LOOP_IN_TERMS)
        if not self._own_loop_warned and self._fed is None:
            self._own_loop_warned = True
            warnings.warn(refusals.OWN_LOOP, stacklevel=2)
        if module is not self._backend.sharding.outermost:
            raise LogicalBatchError(refusals.part_called(module))

    def deliver(self, sums: ClippedSums) -> Sequence[Tensor | None]:
        """Take an anchor's clipped sums; return one gradient per parameter for autograd."""
        try:
            self._require_clean(sums)
        except LogicalBatchError:
            if self.state is not BatchState.COLLECTING:
                # nothing was collected
                self._own.clear()
                if self._fed is not None:
                    self._fed.clear()
            raise
        self.state = BatchState.COLLECTING
        return self._backend.reduction.reduce(sums.names, self._first_gradients.noting(sums.take))

    def _require_clean(self, sums: ClippedSums) -> None:
        if sums.handed_out:
            raise LogicalBatchError(refusals.HANDED_OUT)
        if self.state is not BatchState.COLLECTING:
            self._backend.gradients.refuse_stale()

    @property
    def moment(self) -> tuple[int | None, int]:
        """Position and number of micro-batches; (None, 1) in an own loop."""
        plan = self.plan
        return (None, 1) if plan is None else (plan.position, plan.count)

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take a group's norms [B] on one tape."""
        if group.index not in self.clipper.spanning:
            self.metrics.observe(group, norm_B, is_padding_B)
        if is_padding_B is not None and self.batch is not None:
            self._silence.observe(group, norm_B, is_padding_B)
        for padding_B, watch in self._watched:
            if padding_B is is_padding_B:
                watch.observe(group, norm_B)

    # --- one logical batch after another

    def batches(self, loaded: Loaded, next_step: Callable[[], int]) -> Iterator[LogicalBatch]:
        """Yield the logical batches, which the script must release."""
        if self.state is BatchState.CLOSED:
            raise LogicalBatchError(refusals.DETACHED)
        feed = Feed(loaded)
        self.begin_anew(feed)  # an abandoned logical batch must not count twice
        try:
            while (plan := feed.peek()) is not None:
                if self._loop is not feed or plan.step != next_step():
                    raise LogicalBatchError(refusals.superseded(detached=self.state is BatchState.CLOSED))
                within = self._backend.reduction.micro_batch
                self.batch = LogicalBatch(plan, feed, lambda: self.epoch, within, self._end_micro_batch)
                self.state, self.metrics = BatchState.EMPTY, BatchMetrics()
                self._begin_doubts()
                yield self.batch
                if self._loop is feed and self.batch is not None:
                    self.batch.end_micro_batch()
                    raise LogicalBatchError(
                        refusals.unreleased(self.batch, self.state, self._backend.sharding.writes.counted_write)
                    )
        finally:
            if self._loop is feed:
                self._loop = None
                LOOPING.discard(self)
                if self.batch is not None and not self.batch.complete:
                    self.begin_anew()  # a part of a Poisson sample is not a Poisson sample
                # Otherwise optimizer.step() may follow the loop.

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate an optimizer's closure; raise LogicalBatchError if a backward came before it."""
        latest = self._own[-1:] if self.state is BatchState.COLLECTING else []
        value = closure()
        if latest and self._own[-1:] != latest:
            self.begin_anew()
            raise LogicalBatchError(refusals.BACKWARD_BEFORE_CLOSURE)
        return value

    def begin_release(self, step: int) -> bool:
        """Return True if there is something to release; False if it is private already.

        Raise LogicalBatchError for a half-finished logical batch, older gradients, or another step's batch.
        """
        refusals.refuse_fork(self._process)
        if self.state is BatchState.CLOSED:
            raise LogicalBatchError(refusals.DETACHED)
        if self.state is BatchState.PRIVATIZED:
            return False
        if self.batch is not None and not self.batch.complete:
            raise LogicalBatchError(refusals.half_finished(self.batch))
        if self.batch is not None and self.batch.step != step:
            # A batch must not get the noise of another step.
            raise LogicalBatchError(refusals.failed_release(self.batch, step))
        if self.state is not BatchState.COLLECTING:
            self._backend.gradients.refuse_stale()
            self._backend.sharding.writes.note()  # no sums: any write is honest
            if self.batch is None:
                return False  # a step before any backward
        return True

    def complete_sums(self, digest: Callable[[Sequence[SumShard]], Tensor]) -> list[int]:
        """Sum over ranks, and return the digest; raise LogicalBatchError on all ranks for an incomplete micro-batch."""
        if self._stages is not None and self.batch is not None:
            self.batch.end_micro_batch()
        unfinished = self._unfinished()
        if any(everywhere for _, _, everywhere in unfinished):
            self._refuse(unfinished)  # the other ranks wait in another collective
        (broken, *doubts), sums = self._backend.complete_sums(bool(unfinished), self._own_doubts(), digest)
        if broken:
            self._refuse(unfinished)
        if self.batch is None and any(doubts):
            self.begin_anew()  # all rows must come again
        Doubts.refuse(doubts)
        self.clipper.abort()
        return sums

    def _end_micro_batch(self, micro: MicroBatch) -> None:
        if self._stages is not None:
            self._stages.end(micro, self._first_gradients.noting, self.metrics.observe)

    def _unfinished(self) -> list[tuple[MicroBatch | None, str, bool]]:
        if self.batch is None:
            return [(None, tape.unfinished, False) for tape in self._own if tape.unfinished]
        found = []
        for micro, why in self.batch.unfinished():
            everywhere = self._backend.reduction.runs_everywhere(last=micro.plan.position == micro.plan.count - 1)
            if micro.plan.samples or everywhere:
                found.append((micro, why, everywhere and micro.untrained))
        return found

    def _refuse(self, unfinished: Sequence[tuple[MicroBatch | None, str, bool]]) -> None:
        micro, why = unfinished[0][:2] if unfinished else (None, "on another rank")
        if self.batch is None:
            self.begin_anew()  # all rows must come again
        raise LogicalBatchError(refusals.not_whole(self.batch, micro, why))

    def _own_doubts(self) -> Tensor:
        for _, watch in self._watched:
            watch.end(self._doubts, self.clipper.function)
        self._silence.end(self._doubts)
        offload = self.clipper.offload
        if offload is not None and (differs := offload.take_differing()) is not None:
            self._doubts.note(Doubt.CHANGED, differs)
        return self._doubts.flags(self._device)

    def _begin_doubts(self) -> None:
        self._doubts = Doubts(at_once=self._backend.communicator.world_size == 1)
        self._silence.begin()
        if self.clipper.offload is not None:
            self.clipper.offload.take_differing()  # of earlier sums
        if self._stages is not None:
            self._stages.begin()
        self._watched: list[tuple[Tensor, Copies | RowWatch]] = []  # padded or packed micro-batches, by mask

    @contextmanager
    def releasing(self, counted: Callable[[], bool]) -> Iterator[None]:
        """Drop an own loop's sums if a release fails after it was counted, because its samples took part."""
        try:
            yield
        except BaseException:
            if self.batch is None and counted():
                self.begin_anew()
            raise

    def end_release(self) -> BatchMetrics:
        """End the logical batch; return its metrics."""
        self.complete_metrics()
        self.state = BatchState.PRIVATIZED
        metrics, self.metrics = self.metrics, BatchMetrics()
        self._begin_doubts()
        self._own.clear()
        if self.batch is not None:
            self.batch = None
            self.clipper.epoch += 1
        return metrics

    def warn_of_unreached(self) -> None:
        """Warn, once, of parameters without a gradient."""
        self._first_gradients.tell(self._backend.communicator.all_gather)

    def complete_metrics(self) -> BatchMetrics:
        """Metrics over all ranks, after the last micro-batch."""
        if self._completed is not self.metrics:
            self._completed = self.metrics
            if self.batch is not None and self._backend.counts:
                self.metrics.samples = self.batch.samples
            ranks = self._backend.counting_ranks
            if ranks.world_size > 1:
                self.metrics.over_ranks([group.label for group in self.clipper.groups], ranks.all_gather)
        return self.metrics

    def require_rest(self) -> None:
        """Raise LogicalBatchError unless the engine is between logical batches."""
        if self.state is BatchState.CLOSED:
            raise LogicalBatchError(refusals.DETACHED)
        # Also before its first backward: its samples would get the loaded step's noise.
        if self.state is BatchState.COLLECTING or self.batch is not None:
            raise LogicalBatchError(refusals.LOADED_WITHIN)

    def require_private(self) -> None:
        """Raise LogicalBatchError unless the gradients are private."""
        if self.state is not BatchState.PRIVATIZED:
            raise LogicalBatchError(refusals.NOT_PRIVATE)

    def close(self) -> None:
        """Drop all sums, and refuse later ones."""
        self.begin_anew()
        self.state = BatchState.CLOSED

    def begin_anew(self, loop: Feed | None = None) -> None:
        """Drop the logical batch and its sums; `loop` brings the next ones."""
        self.clipper.epoch += 1
        self._loop, self.batch = loop, None
        (LOOPING.discard if loop is None else LOOPING.add)(self)
        self._own.clear()
        if self._fed is not None:
            self._fed.clear()
        if self.state is BatchState.COLLECTING:
            self.clipper.abort()
            self._backend.gradients.drop()
        self._begin_doubts()
        self.state, self.metrics = BatchState.EMPTY, BatchMetrics()
