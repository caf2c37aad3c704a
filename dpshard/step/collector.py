"""Collects the clipped sums of one logical batch after another: what belongs to it, and when it may be released."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from weakref import WeakSet

from torch import Tensor, nn

from dpshard.backends.local import LocalBackend
from dpshard.clipping.autograd_nodes import accumulates
from dpshard.clipping.functions import ClippingFunction, ClippingGroup
from dpshard.clipping.metrics import BatchMetrics
from dpshard.clipping.tape import Clipper, Take, Tape
from dpshard.config import Execution
from dpshard.errors import LogicalBatchError
from dpshard.interception import Copies, Doubts, RowIdentity
from dpshard.sampling import MicroBatchPlan
from dpshard.step.logical_batch import Loaded, LogicalBatch


class BatchState(Enum):
    """Where the gradients of the logical batch stand (called a lot in Abadi et al. 2016, arXiv:1607.00133)."""

    EMPTY = auto()  # no clipped sum has been collected since the engine was made, reset or loaded
    COLLECTING = auto()  # clipped sums accumulate
    PRIVATIZED = auto()  # noise is in: the gradients are safe to use, once or many times


class Collector:
    """The logical batch in progress, from its first forward to its release.

    Whatever would count a sample twice, in the release of another step, or not at all raises LogicalBatchError.
    `mean`: whether losses are means over the rows of the micro-batch.
    """

    def __init__(
        self,
        backend: LocalBackend,
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        *,
        mean: bool,
    ) -> None:
        self.state = BatchState.EMPTY
        self.batch: LogicalBatch | None = None
        """The logical batch of `engine.batches`; None in a loop of the user's own."""
        self.metrics = BatchMetrics()
        """Of the logical batch in progress."""
        self.two_passes = execution.backward_passes == 2
        self.clipper = Clipper(
            backend.shapes,
            groups,
            function,
            execution,
            self._deliver,
            self._observe,
            backend.anchored,
            backend.values,
        )
        self._backend = backend
        self._device = next(iter(backend.parameters.values())).device
        self._mean = mean
        self._tapes: WeakSet[Tape] = WeakSet()  # a graph that is still to be differentiated keeps its own alive
        self._begin_doubts()
        self._restarts = 0  # batches drawn before a restart belong to another run
        self._closed = False
        self._own_loop_warned = False

    # --- forward and backward ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> MicroBatchPlan | None:
        """See Session."""
        micro = self.batch.micro if self.batch is not None else None
        return None if micro is None else micro.plan

    @property
    def rows(self) -> RowIdentity | None:
        """See Session."""
        micro = self.batch.micro if self.batch is not None else None
        if micro is None:
            return None
        if micro.rows is None:
            micro.rows = RowIdentity(micro.plan, micro.data, self._doubts, mean=self._mean)
        return micro.rows

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """See Session."""
        if self.clipper.pending:
            self.clipper.abort()  # a backward that raised left records behind
        if self.state is not BatchState.COLLECTING:
            self._backend.refuse_changed_parameters()
        scale = float(batch_size) if self._mean else 1.0
        micro = self.batch.micro if self.batch is not None else None
        if micro is None:
            self._require_own_loop(module)
            tape = Tape(self.clipper, batch_size, None, scale)
        else:
            if micro.tape is None:
                is_padding_B = micro.plan.is_padding.to(self._device)
                micro.tape = Tape(self.clipper, batch_size, is_padding_B, scale)
                if micro.rows is not None and micro.rows.copies is not None:
                    self._watched.append((is_padding_B, micro.rows.copies))
            tape = micro.tape
            if tape.aborted:
                raise LogicalBatchError(
                    "Backward failed on this micro-batch, and part of its samples may have been counted: go on with "
                    "the next micro-batch rather than repeating this one."
                )
        tape.forwards += 1
        self._tapes.add(tape)
        return tape

    def _require_own_loop(self, module: nn.Module) -> None:
        """Raise LogicalBatchError for a forward that is neither in a micro-batch nor in a loop of the user's own."""
        if self.batch is not None:
            raise LogicalBatchError(
                "The model was called for training between two micro-batches of engine.batches, or between two logical "
                "batches. Evaluate in model.eval() or under torch.no_grad(). To send the gradient of another model "
                "through it, as a GAN does, use model.eval().requires_grad_(False), and undo both afterwards."
            )
        if not self._own_loop_warned:
            self._own_loop_warned = True
            warnings.warn(
                "This loop feeds its own batches: epsilon holds only if each was drawn by Poisson sampling with "
                "probability batch_size / sample_size (a shuffled DataLoader is not), and if no sample is in two "
                "forwards of one step. engine.batches(dataset, micro_batch_size) sees to both.",
                stacklevel=2,
            )
        if module is not self._backend.outermost:
            raise LogicalBatchError(
                f"{type(module).__name__}, a part of the model, was called directly: its gradients would be clipped "
                f"apart from the rest. Call the whole model, or iterate over engine.batches(...), which says which "
                f"calls belong to the same samples."
            )

    def _deliver(self, names: Sequence[str], take: Take) -> Sequence[Tensor | None]:
        leaf = self._backend.anchored[names[0]]
        if leaf.requires_grad and not accumulates(leaf):
            raise LogicalBatchError(
                "torch.autograd.grad(loss, parameters) would hand out clipped sums without noise, and no step would be "
                "counted. Call loss.backward(), then engine.privatize(), and read the gradients from .grad."
            )
        if self.state is not BatchState.COLLECTING:
            self._backend.refuse_stale_gradients()
            self.state = BatchState.COLLECTING
        return self._backend.reduce(names, take)

    def _observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        self.metrics.observe(group, norm_B, is_padding_B)
        for padding_B, copies in self._watched:
            if padding_B is is_padding_B:
                copies.observe(group, norm_B)

    # --- one logical batch after another ----------------------------------------------------------------------------

    def batches(self, loaded: Loaded, next_step: Callable[[], int]) -> Iterator[LogicalBatch]:
        """The logical batches that were `loaded`, each of which must be released; `next_step` numbers the releases."""
        if self.batch is not None:
            self.batch.abandoned, self.batch = True, None
        self._end_tapes()
        self._drop_sums()  # of a loop that ended within a logical batch, which is drawn again: it must not count twice
        restarts, batch = self._restarts, None
        try:
            for plan, data in loaded:
                if self._closed:
                    raise LogicalBatchError(
                        "The engine was detached, and the model is an ordinary one: make a new engine, and load the "
                        "state_dict() of this one to go on with its run."
                    )
                if restarts != self._restarts or plan.step != next_step() or (batch is not None and batch.abandoned):
                    raise LogicalBatchError(
                        "These batches were begun before load_state_dict(), or before another engine.batches(...): "
                        "they are not the next ones of the run. Call engine.batches(...) again."
                    )
                batch = self.batch = LogicalBatch(plan, data, loaded, self._backend.micro_batch)
                self._begin_doubts()
                self.metrics = BatchMetrics()  # of a backward that failed before it delivered anything, too
                yield batch
                batch.require_release()
        finally:
            if batch is not None:
                batch.abandoned = True
                if self.batch is batch and not batch.complete:
                    self._drop_sums()  # the first rows of a Poisson sample are no Poisson sample
                if self.batch is batch and (batch.released or not batch.complete):
                    self._end_tapes()
                    self.batch = None
                # Else optimizer.step() may follow after the loop, and must find the noise of this very batch.

    def begin_release(self, step: int) -> bool:
        """Whether there is anything to release: not if the gradients are private already, or nothing was collected.

        Raises LogicalBatchError on a half-finished logical batch, for gradients of before it, and for one that is not
        of `step`, which the release would be counted as.
        """
        if self.state is BatchState.PRIVATIZED and (self.batch is None or self.batch.released):
            return False
        if self.batch is not None and not self.batch.complete:
            raise LogicalBatchError(
                f"optimizer.step() came after {self.batch.position} of the {len(self.batch)} micro-batches of this "
                f"logical batch. Step once per logical batch, after the loop over its micro-batches."
            )
        if self.batch is not None and self.batch.step != step:
            # A run that is resumed from before it would draw the same noise for another batch: they would differ by
            # sums without noise.
            raise LogicalBatchError(
                f"The release of step {self.batch.step} failed after it was counted, and its batch must not have the "
                f"noise of step {step}. Leave the loop: engine.batches(...) goes on with step {step}."
            )
        if self.state is not BatchState.COLLECTING:
            self._backend.refuse_stale_gradients()
            if self.batch is None:
                return False  # a step before any backward
        self.clipper.abort()
        return True

    def doubts(self) -> Tensor | None:
        """What speaks against the release on this rank; None if nothing can, on any rank."""
        if self.batch is None:
            return None
        for _, copies in self._watched:
            copies.end(self._doubts, self.clipper.function)
        flags = self._doubts.flags(self._device)
        return self._doubts.none(self._device) if flags is None and self._backend.world_size > 1 else flags

    def _begin_doubts(self) -> None:
        self._doubts = Doubts(at_once=self._backend.world_size == 1)
        self._watched: list[tuple[Tensor, Copies]] = []  # padded micro-batches, by the mask of their tape

    def end_release(self) -> BatchMetrics:
        """The noise is in: what comes now is another logical batch. Returns the figures of this one, over all ranks."""
        if self.batch is not None:
            self.metrics.samples = self.batch.samples
        if self._backend.world_size > 1:
            self.metrics.over_ranks([group.label for group in self.clipper.groups], self._backend.stack)
        self.state = BatchState.PRIVATIZED
        metrics, self.metrics = self.metrics, BatchMetrics()
        if self.batch is not None:
            self.batch.released = True
            self._end_tapes()
            if self.batch.abandoned:
                self.batch = None
        return metrics

    def require_rest(self) -> None:
        """Raise LogicalBatchError in the middle of a logical batch, where no state can be loaded."""
        # Also before its first backward: its samples would be released with the noise of the step that is loaded.
        if self.state is BatchState.COLLECTING or (self.batch is not None and not self.batch.released):
            raise LogicalBatchError(
                "load_state_dict() in the middle of a logical batch: load before the loop over engine.batches(...), "
                "or after optimizer.step(), and leave that loop."
            )

    def require_private(self) -> None:
        """Raise LogicalBatchError if the gradients are clipped sums without noise, or none at all."""
        if self.state is not BatchState.PRIVATIZED:
            raise LogicalBatchError(
                "There are no private gradients yet: call engine.privatize() after the micro-batches of a logical "
                "batch, and look at them before the optimizer's step."
            )

    def restart(self) -> None:
        """Another state was loaded: logical batches that were drawn before do not count."""
        self._restarts += 1
        self.state, self.batch = BatchState.EMPTY, None

    def close(self) -> None:
        """Hand out no further logical batch; clipped sums that were not privatized are dropped."""
        self._closed = True
        if self.state is BatchState.COLLECTING:
            self._backend.drop_gradients()

    def _end_tapes(self) -> None:
        """Take no more samples of the forwards so far: a late backward would put them into another release."""
        for tape in self._tapes:
            tape.ended = True

    def _drop_sums(self) -> None:
        if self.state is BatchState.COLLECTING:
            self.clipper.abort()
            self._backend.drop_gradients()
            self.state, self.metrics = BatchState.EMPTY, BatchMetrics()
