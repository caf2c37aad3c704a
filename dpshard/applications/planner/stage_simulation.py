"""Two parts of a micro-batch on one stage of a pipeline of fake tensors.

The second part finds the gradients of the first, whose activations are gone. So memory at any point of a schedule is
that of the second part, and what other parts hold. Groups that span stages are summed after the last part.

With tensor parallelism, hidden states under autocast are bfloat16, as in Megatron-LM. Sums with float32 embeddings
would be float32.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from dpshard import backends
from dpshard.applications.planner.counts import Counts
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.models import FakeModel, Transformer, cross_entropy
from dpshard.applications.planner.parallel import cut_weights, replaced
from dpshard.applications.planner.simulation import Clipping, Setup, Simulation
from dpshard.applications.planner.timeline import Event
from dpshard.applications.transformer import GPT, Block
from dpshard.backends.backend import Backend
from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.pipeline import StageSharding
from dpshard.backends.sharding import Unsharded
from dpshard.backends.stage_sums import WholeSums
from dpshard.clipping.autograd_nodes import in_full_precision
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.tape import ClippedSums, Tape, Use
from dpshard.engine import PrivacyEngine

FIRST, FORWARD, BACKWARD, SUMS, UPDATE = "first part", "forward", "backward", "sums", "update"
"""Forward and backward are of the second part."""


@dataclass(frozen=True, slots=True)
class StageCounts:
    """Costs of a part."""

    forward: int
    backward: int
    sums: int
    held: int
    """Bytes between forward and backward."""
    kept: int
    """Bytes until the schedule ends."""
    buffers: int
    """Of received tensors."""
    peaks: dict[str, int]
    """By phase, without other parts and buffers."""
    collectives: dict[str, tuple[Event, ...]] = field(default_factory=dict)

    def waits(self, phase: str, hardware: Hardware) -> float:
        """Return the seconds of collectives."""
        return sum(event.seconds(hardware) for event in self.collectives.get(phase, ()))


def count_stage(simulation: StageSimulation, clipping: Clipping | None, micro_batch: int) -> StageCounts:
    """Return the costs of a part."""
    counts = simulation.count(clipping, micro_batch)
    place = {
        phase: [i for i, event in enumerate(counts.events) if event.phase == phase]
        for phase in (FORWARD, BACKWARD, SUMS, UPDATE)
    }
    flops = {phase: sum(counts.events[i].flops for i in some) for phase, some in place.items()}
    # A phase ends with a mark of the memory that the next one finds.
    marks = place[FORWARD][0] - 1, place[FORWARD][-1], place[BACKWARD][-1]
    before, between, after = (sum(counts.ends[i]) for i in marks)
    kept, buffers = after - before if place[SUMS] else 0, simulation.buffers
    peaks = {}
    for phase, some in place.items():
        others = buffers if phase == UPDATE else buffers + kept
        peaks[phase] = max((sum(counts.peaks[i]) - others for i in some), default=0)
    waits = {phase: tuple(e for e in counts.events if e.waits and e.phase == phase) for phase in (FORWARD, BACKWARD)}
    held, sums = between - before, flops[SUMS] // 2
    return StageCounts(flops[FORWARD], flops[BACKWARD], sums, held, kept, buffers, peaks, waits)


class Stage(GPT):
    """Blocks of a GPT, with embeddings or head."""

    def __init__(
        self,
        shape: Transformer,
        length: int,
        block: Any,
        *,
        first: bool,
        last: bool,
        hidden: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(shape.vocabulary, length, shape.width, shape.layers, block, head=True)
        if not first:
            del self.tokens, self.positions
        if not last:
            del self.norm, self.head
        self._first, self._last, self._hidden = first, last, hidden

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states [B, T, D] or the last stage's logits."""
        h_BTD = x
        if self._first:
            h_BTD = (self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))).to(self._hidden)
        for block in self.blocks.children():
            assert isinstance(block, Block)
            h_BTD = block(h_BTD)
        if not self._last:
            return h_BTD
        assert self.head is not None
        return self.head(self.norm(h_BTD))


class StageSimulation(Simulation):
    """One rank of a stage."""

    def __init__(self, setup: Setup, shape: Transformer, *, first: bool, last: bool) -> None:
        self._shape, self._first, self._last, self._tp = shape, first, last, setup.tp
        self._hidden = torch.bfloat16 if setup.tp > 1 and setup.precision == "bf16" else torch.float32
        self._tapes: dict[Tape, None] = {}
        super().__init__(replace(setup, model=shape, ranks=1, micro_batches=2, tp=1))

    @property
    def buffers(self) -> int:
        """Bytes received by a part."""
        return sum(x.nbytes for x in (self._received, self._gradient) if x is not None)

    def _build(self) -> FakeModel:
        setup, shape = self.setup, self._shape
        length, block = setup.seq or shape.seq, shape.block(checkpointing=setup.checkpointing)
        model = Stage(shape, length, block, first=self._first, last=self._last, hidden=self._hidden)

        def inputs(batch: int) -> tuple[dict[str, Tensor], Tensor]:
            ids_BT = torch.zeros(batch, length, dtype=torch.int64)
            return {"x": ids_BT if self._first else self._hidden_state(batch, length)}, ids_BT

        return FakeModel(
            model, list(model.blocks), inputs, cross_entropy, loss_parallel if self._tp > 1 else nullcontext
        )

    def _hidden_state(self, batch: int, length: int) -> Tensor:
        return torch.empty(batch, length // self._tp, self._shape.width, dtype=self._hidden)

    def _mesh(self) -> Any:
        return init_device_mesh("cpu", (self._tp,), mesh_dim_names=("tp",)) if self._tp > 1 else None

    def _shard(self, subject: FakeModel, mesh: Any) -> nn.Module:
        if mesh is not None:
            assert isinstance(subject.model, Stage)
            cut_weights(subject.model, mesh)
            self.meter.waited = list(range(self._tp))
        return subject.model

    def _engine(self, clipping: Clipping, rows: int) -> PrivacyEngine:
        with replaced(backends, "local_backend", self._backend):
            return super()._engine(clipping, rows)

    def _backend(self, model: nn.Module, declared: Any = None) -> Backend:
        sharding = _Alone(model)
        store, alone = DotGradStore(sharding), Communicator()
        self._sums = WholeSums(sharding, store, alone)
        return _StageBackend("a stage", alone, sharding, self._sums, store)

    def _note(self, tape: Tape, use: Use) -> None:
        super()._note(tape, use)
        self._tapes[tape] = None

    def count(self, clipping: Clipping | None, micro_batch: int) -> Counts:
        """Return the counts of a step with this clipping and micro-batch size."""
        self._tapes.clear()
        return super().count(clipping, micro_batch)

    def _step(self, logical_batch: Iterable[Any], micro_batch: int) -> None:
        inputs, targets = self.subject.inputs(micro_batch)
        self._received = inputs["x"]
        self._gradient = None if self._last else self._hidden_state(*targets.shape)
        gc.collect()
        self.meter.restart()
        self.meter.phase = FIRST
        # Around the schedule, autocast keeps one copy of the parameters for all parts.
        with self._autocast(), self.subject.around_step():
            for i, _ in enumerate(logical_batch):
                self._part(targets, (FORWARD, BACKWARD) if i else (FIRST, FIRST))
        if self._tapes and next(iter(self._tapes)).clipper.spanning:
            self.meter.begin(SUMS)
            self._sum_spanning()
        self.meter.begin(UPDATE)
        self._update()

    def _part(self, targets: Tensor, phases: tuple[str, str]) -> None:
        gc.collect()
        self.meter.begin(phases[0])
        x = self._received.detach().requires_grad_(not self._first)
        output = self.model(x)
        loss = self.subject.loss(output, targets) if self._last else output
        gc.collect()
        self.meter.begin(phases[1])
        loss.backward(self._gradient)

    def _sum_spanning(self) -> None:
        tapes = list(self._tapes)
        self._tapes.clear()
        clipper = tapes[0].clipper
        with torch.no_grad(), in_full_precision(torch.device("cpu")):
            for tape in tapes:
                for index in clipper.spanning:
                    norm_sq_B = tape.closer.own_norm_sq_B(index)
                    assert norm_sq_B is not None
                    tape.closer.clip_spanning(index, norm_sq_B)
            for index in clipper.spanning:
                names = clipper.groups[index].names
                self._sums.add_later(names, ClippedSums(names, tapes, False).take)


class _Alone(Unsharded):
    accumulates = True
    unclipped = StageSharding.unclipped


class _StageBackend(Backend):
    __slots__ = ()

    def own_groups(self, groups: Sequence[ClippingGroup]) -> tuple[tuple[ClippingGroup, ...], frozenset[int]]:
        labels = ("all-layer", "outside of blocks")
        return tuple(groups), frozenset(group.index for group in groups if group.label in labels)
