"""Plans of pipelines: stages counted one by one, and a schedule of their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.models import PRESETS, Transformer
from dpshard.applications.planner.schedule import order_of, peak_of, walk
from dpshard.applications.planner.simulation import Clipping, Setup, counting
from dpshard.applications.planner.stage_simulation import SUMS, StageCounts, StageSimulation, count_stage
from dpshard.applications.planner.timeline import update_bytes
from dpshard.config import is_count
from dpshard.errors import ConfigurationError

PIPELINE_CLIPPINGS = (Clipping("all-layer"), Clipping("block-wise"), Clipping("layer-wise"))


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one step."""

    span: float
    """From the first forward to the last backward."""
    sums: float
    """Norms of groups that span stages, and their clipped sums on the slowest stage."""
    reduction: float
    """All-reduce over replicas, beyond what runs beside backward."""
    update: float
    bubble: float
    """Share of the span in which stages wait."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.span + self.sums + self.reduction + self.update


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """Costs of the stages, the first one first."""

    clipping: Clipping | None
    """None for ordinary training."""
    stages: tuple[StageCounts, ...]

    @property
    def label(self) -> str:
        """Name for users."""
        return "not private" if self.clipping is None else self.clipping.style


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Result of `dpshard plan --pp`."""

    setup: Setup
    """Its micro_batches are the parts of a schedule's step."""
    micro_batch: int
    """Samples of a part."""
    elements: tuple[int, ...]
    """Parameters of each stage."""
    positions: int
    """Tokens of a sample."""
    width: int
    estimates: tuple[PipelineEstimate, ...]
    """Ordinary training first."""

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.elements)

    @property
    def replicas(self) -> int:
        """Pipelines side by side."""
        return self.setup.ranks // self.pp

    def peaks(self, estimate: PipelineEstimate) -> list[int]:
        """Return the peak memory of each stage in bytes."""
        parts = self.setup.micro_batches
        return [peak_of(stage, order_of(s, self.pp, parts), parts) for s, stage in enumerate(estimate.stages)]

    def times(self, estimate: PipelineEstimate, hardware: Hardware) -> PipelineTimes:
        """Return the time of a step."""
        speed, parts = hardware.flops(self.setup.precision), self.setup.micro_batches
        forward = [stage.forward / speed for stage in estimate.stages]
        backward = [stage.backward / speed for stage in estimate.stages]
        found = walk(forward, backward, self._hops(hardware), parts)
        reductions = [self._reduction(n, hardware) for n in self.elements]
        private = estimate.clipping is not None
        if private:
            reduction = max(reductions)
        else:  # DistributedDataParallel reduces beside the last backward, and each stage for itself
            pairs = zip(found.last_backwards, reductions, strict=True)
            reduction = max(0.0, max(begin + seconds for begin, seconds in pairs) - found.span)
        sums = 0.0
        if any(stage.peaks[SUMS] for stage in estimate.stages):
            norms = 8 * self.pp * self.micro_batch * parts
            sums = hardware.collective_seconds("all-gather", norms, self.pp, within_node=self._within(self.pp))
            sums += max(stage.sums for stage in estimate.stages) * parts / speed
        moved = max(update_bytes(n, self.setup.optimizer, private=private) for n in self.elements)
        work = parts * (sum(forward) + sum(backward))
        return PipelineTimes(
            span=found.span,
            sums=sums,
            reduction=reduction,
            update=hardware.memory_seconds(moved),
            bubble=1 - work / (self.pp * found.span),
        )

    def rate(self, estimate: PipelineEstimate, hardware: Hardware) -> float:
        """Return tokens a second and GPU."""
        tokens = self.micro_batch * self.setup.micro_batches * self.replicas * self.positions
        return tokens / self.times(estimate, hardware).total / self.setup.ranks

    def _within(self, size: int) -> bool:
        return self.setup.node % size == 0

    def _hops(self, hardware: Hardware) -> list[float]:
        """Return the seconds in which stages send a part to the next one; replicas stand one after another.

        Under autocast sums with float32 embeddings are float32, and so is what stages send.
        """
        nbytes, node = 4 * self.micro_batch * self.positions * self.width, self.setup.node
        found = []
        for s in range(1, self.pp):
            first = range(0, self.setup.ranks, self.pp)
            near = all((at + s - 1) // node == (at + s) // node for at in first)
            found.append(hardware.hop_seconds(nbytes, within_node=near))
        return found

    def _reduction(self, elements: int, hardware: Hardware) -> float:
        near = self.setup.ranks <= self.setup.node
        return hardware.collective_seconds("all-reduce", 4 * elements, self.replicas, within_node=near)


def make_pipeline_plan(
    setup: Setup,
    *,
    pp: int,
    micro_batch: int = 1,
    clippings: Sequence[Clipping] = PIPELINE_CLIPPINGS,
    report: Callable[[str], None] = lambda _: None,
) -> PipelinePlan:
    """Count the first, a middle and the last of `pp` stages under 1F1B.

    Raises ConfigurationError for pipelines that dpshard does not train, and for models that are not planned.
    """
    shape = _shape(setup, pp, micro_batch, clippings)
    of_stage = replace(shape, layers=shape.layers // pp)
    ends = [(True, False), *([(False, False)] if pp > 2 else []), (False, True)]
    found: dict[Clipping | None, list[StageCounts]] = {clipping: [] for clipping in (None, *clippings)}
    elements: list[int] = []
    positions = setup.seq or shape.seq
    with counting():
        for first, last in ends:
            copies = 1 if first or last else pp - 2
            simulation = StageSimulation(setup, of_stage, first=first, last=last)
            elements += [simulation.elements] * copies
            for clipping, stages in found.items():
                style = "not private" if clipping is None else clipping.style
                report(f"{'first' if first else 'last' if last else 'middle'} stage, {style}")
                stages += [count_stage(simulation, clipping, micro_batch)] * copies
    estimates = tuple(PipelineEstimate(clipping, tuple(stages)) for clipping, stages in found.items())
    return PipelinePlan(setup, micro_batch, tuple(elements), positions, shape.width, estimates)


def _shape(setup: Setup, pp: int, micro_batch: int, clippings: Sequence[Clipping]) -> Transformer:
    """Return the shape of the model. Raises ConfigurationError for what make_pipeline_plan refuses."""
    for name, value in (("pp", pp), ("micro_batch", micro_batch), ("micro_batches", setup.micro_batches)):
        if not is_count(value):
            raise ConfigurationError(f"{name}={value!r}: give a count, at least 1.")
    if pp < 2:
        raise ConfigurationError(f"pp={pp}: a pipeline has at least 2 stages.")
    if setup.tp * setup.cp > 1:
        raise ConfigurationError(
            "pp with tp or cp is not planned, because the engine refuses tensor and context parallelism within a stage."
        )
    if setup.shard != "ddp":
        raise ConfigurationError(
            f"pp with shard={setup.shard} is not planned: the plan counts whole stages, with replicas in "
            f"DistributedDataParallel. Choose shard=ddp."
        )
    if setup.ranks % pp:
        raise ConfigurationError(f"{setup.ranks} ranks do not divide into pipelines of {pp} stages. Choose others.")
    shape = PRESETS.get(setup.model) if isinstance(setup.model, str) else setup.model
    if shape is None or shape.patch is not None or shape.tied:
        raise ConfigurationError("pp is planned for gpt-26b, gpt-100b and gpt-1t. Plan other models without.")
    if shape.layers % pp:
        raise ConfigurationError(f"{shape.layers} layers do not divide by {pp} stages. Choose another pp.")
    if setup.micro_batches < pp:
        raise ConfigurationError(
            f"micro_batches={setup.micro_batches}: torch's 1F1B needs at least as many parts as its {pp} stages."
        )
    if any(clipping.passes > 1 for clipping in clippings):
        raise ConfigurationError("pp is planned with one backward pass: groups on several stages refuse two.")
    return shape
