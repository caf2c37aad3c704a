"""Plans of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.models import PRESETS, Transformer
from dpshard.applications.planner.parallel import require_parts
from dpshard.applications.planner.schedule import order_of, peak_of, walk
from dpshard.applications.planner.simulation import Clipping, Setup, counting, fake_group, require_counts
from dpshard.applications.planner.stage_simulation import (
    BACKWARD,
    FORWARD,
    SUMS,
    StageCounts,
    StageSimulation,
    count_stage,
)
from dpshard.applications.planner.timeline import update_bytes
from dpshard.errors import ConfigurationError

PIPELINE_CLIPPINGS = (Clipping("all-layer"), Clipping("block-wise"), Clipping("layer-wise"))


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one step."""

    span: float
    within: float
    sums: float
    reduction: float
    """Beyond what runs beside backward."""
    update: float
    bubble: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.span + self.sums + self.reduction + self.update


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """Costs of the stages."""

    clipping: Clipping | None
    stages: tuple[StageCounts, ...]

    @property
    def label(self) -> str:
        """Name for users."""
        return _style(self.clipping)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Result of `dpshard plan --pp`."""

    setup: Setup
    micro_batch: int
    elements: tuple[int, ...]
    shards: tuple[int, ...]
    positions: int
    sent: int
    """Bytes of a part to the next stage."""
    estimates: tuple[PipelineEstimate, ...]

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.elements)

    @property
    def replicas(self) -> int:
        """Pipelines side by side."""
        return self.setup.ranks // (self.pp * self.setup.tp)

    def peaks(self, estimate: PipelineEstimate) -> list[int]:
        """Return the peak bytes of stages."""
        parts = self.setup.micro_batches
        return [peak_of(stage, order_of(s, self.pp, parts), parts) for s, stage in enumerate(estimate.stages)]

    def times(self, estimate: PipelineEstimate, hardware: Hardware) -> PipelineTimes:
        """Return the time of a step."""
        speed, parts = hardware.flops(self.setup.precision), self.setup.micro_batches
        waits = [(stage.waits(FORWARD, hardware), stage.waits(BACKWARD, hardware)) for stage in estimate.stages]
        forward = [stage.forward / speed + wait for stage, (wait, _) in zip(estimate.stages, waits, strict=True)]
        backward = [stage.backward / speed + wait for stage, (_, wait) in zip(estimate.stages, waits, strict=True)]
        found = walk(forward, backward, self._hops(hardware), parts)
        near = self.setup.ranks <= self.setup.node
        reductions = [
            hardware.collective_seconds("all-reduce", 4 * n, self.replicas, within_node=near) for n in self.shards
        ]
        private = estimate.clipping is not None
        if private:
            reduction = max(reductions)
        else:  # each stage reduces beside its last backward
            pairs = zip(found.last_backwards, reductions, strict=True)
            reduction = max(0.0, max(begin + seconds for begin, seconds in pairs) - found.span)
        sums = 0.0
        if any(stage.peaks[SUMS] for stage in estimate.stages):
            norms = 8 * self.pp * self.micro_batch * parts
            near = self.setup.node % self.pp == 0
            sums = hardware.collective_seconds("all-gather", norms, self.pp, within_node=near)
            sums += max(stage.sums for stage in estimate.stages) * parts / speed
        moved = max(update_bytes(n, self.setup.optimizer, private=private) for n in self.shards)
        work = parts * (sum(forward) + sum(backward))
        return PipelineTimes(
            span=found.span,
            within=parts * max(map(sum, waits)),
            sums=sums,
            reduction=reduction,
            update=hardware.memory_seconds(moved),
            bubble=1 - work / (self.pp * found.span),
        )

    def rate(self, estimate: PipelineEstimate, hardware: Hardware) -> float:
        """Return tokens a second and GPU."""
        tokens = self.micro_batch * self.setup.micro_batches * self.replicas * self.positions
        return tokens / self.times(estimate, hardware).total / self.setup.ranks

    def _hops(self, hardware: Hardware) -> list[float]:
        tp, node = self.setup.tp, self.setup.node
        found = []
        for s in range(1, self.pp):
            first = range(0, self.setup.ranks, self.pp * tp)
            near = all((at + (s - 1) * tp) // node == (at + s * tp) // node for at in first)
            found.append(hardware.hop_seconds(self.sent, within_node=near))
        return found


def make_pipeline_plan(
    setup: Setup,
    *,
    pp: int,
    micro_batch: int = 1,
    clippings: Sequence[Clipping] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> PipelinePlan:
    """Count the first, a middle and the last of `pp` stages under 1F1B; one stage is the whole model.

    Without `clippings` all possible styles are counted. Raises ConfigurationError for pipelines that are not planned.
    """
    alone = setup.tp > 1 or pp == 1
    if clippings is None:
        clippings = () if alone else PIPELINE_CLIPPINGS
    shape = _shape(setup, pp, micro_batch, clippings)
    of_stage = replace(shape, layers=shape.layers // pp)
    ends = [(True, False), *([(False, False)] if pp > 2 else []), (False, True)] if pp > 1 else [(True, True)]
    found: dict[Clipping | None, list[StageCounts]] = {clipping: [] for clipping in (None, *clippings)}
    stages: list[StageSimulation] = []
    with fake_group(setup.tp) if setup.tp > 1 else counting():
        for first, last in ends:
            copies = 1 if first or last else pp - 2
            simulation = StageSimulation(setup, of_stage, first=first, last=last)
            stages += [simulation] * copies
            for clipping, counts in found.items():
                report(f"{'first' if first else 'last' if last else 'middle'} stage, {_style(clipping)}")
                counts += [count_stage(simulation, clipping, micro_batch)] * copies
    elements, shards = zip(*((stage.elements, stage.shard_elements) for stage in stages), strict=True)
    sent = stages[-1].buffers if pp > 1 else 0
    estimates = tuple(PipelineEstimate(clipping, tuple(counts)) for clipping, counts in found.items())
    return PipelinePlan(setup, micro_batch, elements, shards, setup.seq or shape.seq, sent, estimates)


def _shape(setup: Setup, pp: int, micro_batch: int, clippings: Sequence[Clipping]) -> Transformer:
    require_counts(pp=pp, micro_batch=micro_batch, micro_batches=setup.micro_batches)
    if pp < 2 and clippings:
        raise ConfigurationError(f"pp={pp}: a pipeline has at least 2 stages. One is planned without clippings alone.")
    if setup.cp > 1:
        raise ConfigurationError("pp with cp is not planned: the engine refuses context parallelism within a stage.")
    if setup.tp > 1 and clippings:
        raise ConfigurationError(
            "pp with tp is planned for ordinary training alone: the engine refuses tensor parallelism within a stage. "
            "Leave the clipping out, or tp."
        )
    if setup.node % setup.tp:
        raise ConfigurationError(f"tp={setup.tp} does not divide a node of {setup.node} ranks. Choose another tp.")
    if setup.shard != "ddp":
        raise ConfigurationError(
            f"pp with shard={setup.shard} is not planned: the plan counts whole stages, with replicas in "
            f"DistributedDataParallel. Choose shard=ddp."
        )
    if setup.ranks % (pp * setup.tp):
        of_ranks = f" of {setup.tp} ranks each" if setup.tp > 1 else ""
        raise ConfigurationError(
            f"{setup.ranks} ranks do not divide into pipelines of {pp} stages{of_ranks}. Choose others."
        )
    shape = PRESETS.get(setup.model) if isinstance(setup.model, str) else setup.model
    if shape is None or shape.patch is not None or shape.tied:
        raise ConfigurationError("pp is planned for gpt-26b, gpt-100b and gpt-1t. Plan other models without.")
    if shape.layers % pp:
        raise ConfigurationError(f"{shape.layers} layers do not divide by {pp} stages. Choose another pp.")
    if setup.micro_batches < pp:
        raise ConfigurationError(
            f"micro_batches={setup.micro_batches}: torch's 1F1B needs at least as many parts as its {pp} stages."
        )
    require_parts(shape.heads, setup.seq or shape.seq, tp=setup.tp)
    if any(clipping.passes > 1 for clipping in clippings):
        raise ConfigurationError("pp is planned with one backward pass: groups on several stages refuse two.")
    return shape


def _style(clipping: Clipping | None) -> str:
    return "not private" if clipping is None else clipping.style
