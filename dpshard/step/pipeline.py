"""A logical batch on one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpshard.backends import Backend
from dpshard.backends.schedules import Chunk, running_chunk
from dpshard.backends.stage_sums import LateSums
from dpshard.backends.stages import Stages
from dpshard.clipping.autograd_nodes import in_full_precision
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.tape import ClippedSums, Clipper, Take, Tape
from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.sampling import MicroBatchPlan
from dpshard.step.logical_batch import LogicalBatch, MicroBatch

_NO_BATCH = (
    "A pipeline trains on engine.batches(dataset, micro_batch_size), on all stages: only it gives a stage the sample "
    "of each row. Call schedule.step(...) once for each micro-batch of a logical batch; to evaluate, call "
    "schedule.eval(...)."
)
_UNUSED = -1.0
"""Stands for the squared norm of a sample without a gradient on this rank."""

Observe = Callable[[ClippingGroup, Tensor, Tensor | None], None]


class InStages:
    """The work of a collector on one stage; see [Note: Stages] in backends/stages.py."""

    def __init__(self, backend: Backend, stages: Stages, clipper: Clipper) -> None:
        if clipper.spanning and clipper.execution.backward_passes == 2:
            labels = [clipper.groups[index].label for index in sorted(clipper.spanning)]
            raise ConfigurationError(
                f"Two backward passes need all norms after the first one. But the clipping groups {labels} have "
                f"parameters on several stages, which run their backwards one after another. Choose a clipping_mode of "
                f"one pass ('auto'), or clipping_style='block-wise' with no such group."
            )
        assert isinstance(backend.reduction, LateSums)
        self._stages, self._clipper, self._reduction = stages, clipper, backend.reduction
        self._device = backend.sharding.device
        self._chunk: Chunk | None = None

    # --- forwards

    @contextmanager
    def forward(self, module: nn.Module, batch: LogicalBatch | None) -> Iterator[bool]:
        """Return a context for a forward; it yields False outside of a schedule."""
        chunk = running_chunk(module, self._stages.group)
        if chunk is not None and (batch is None or batch.micro is None):
            raise LogicalBatchError(_NO_BATCH)
        self._chunk = chunk
        try:
            yield chunk is not None
        finally:
            self._chunk = None

    @property
    def sees_data(self) -> bool:
        """True if inputs are the samples, not activations."""
        return self._chunk is not None and self._chunk.data

    def part_of(self, micro: MicroBatch | None) -> MicroBatch | None:
        """Part of the micro-batch in the running forward."""
        return micro if micro is None or self._chunk is None else micro.chunk(self._chunk.index, self._chunk.count)

    def begin(self) -> None:
        """Begin a logical batch."""
        self._stages.take_inputs()
        self._reduction.forget_fault()  # of sums that were dropped

    def note(self, plan: MicroBatchPlan) -> None:
        """Note the running forward's samples."""
        assert self._chunk is not None
        part = self._chunk.index, self._chunk.count
        self._stages.note_chunk(plan.step, plan.position, *part, plan.indices, plan.samples)

    # --- groups on several stages

    def end(self, micro: MicroBatch, noting: Callable[[Take], Take], observe: Observe) -> None:
        """Complete a micro-batch's sums; all stages must call it."""
        self._reduction.begin_late()  # the script may have changed .grad
        if self._clipper.spanning:
            self._clip_spanning(micro, noting, observe)
        self._reduction.end_micro_batch()

    def _clip_spanning(self, micro: MicroBatch, noting: Callable[[Take], Take], observe: Observe) -> None:
        spanning = sorted(self._clipper.spanning)
        size = len(micro.plan.indices) // max(1, len(micro.chunks))
        tapes = {k: chunk.tape for k, chunk in enumerate(micro.chunks) if chunk is not None and chunk.tape is not None}
        own = torch.full((len(spanning), len(micro.plan.indices)), _UNUSED, dtype=torch.float64, device="cpu")
        held: dict[int, list[Tape]] = {index: [] for index in spanning}
        with torch.no_grad(), in_full_precision(self._device):
            found = {(k, index): tape.closer.own_norm_sq_B(index) for k, tape in tapes.items() for index in spanning}
            for (k, index), norm_sq_B in found.items():
                if norm_sq_B is not None:
                    own[spanning.index(index), k * size : (k + 1) * size] = norm_sq_B.to(own)
            ranks_WGB = self._stages.gather(own)  # all ranks sum in one order, so coefficients are bitwise equal
            total_GB = torch.where(ranks_WGB == _UNUSED, 0.0, ranks_WGB).sum(0)
            used_GB = (ranks_WGB != _UNUSED).any(0)
            for k, tape in tapes.items():
                if tape.unfinished:
                    tape.expire()  # its backward would come too late
                    continue
                for g, index in enumerate(spanning):
                    own_B, norm_sq_B = found[k, index], total_GB[g, k * size : (k + 1) * size].to(self._device)
                    if own_B is not None:
                        tape.closer.clip_spanning(index, norm_sq_B.to(own_B.dtype))
                        held[index].append(tape)
                    if self._stages.rank == 0 and bool(used_GB[g, k * size]):
                        observe(self._clipper.groups[index], norm_sq_B.sqrt() * tape.loss_scale, tape.is_padding_B)
            for index in spanning:
                names = self._clipper.groups[index].names
                self._reduction.add_later(names, noting(ClippedSums(names, held[index], False).take))
