"""One rank of pipelines, each compared with one process; prints JSON.

Usage: torchrun --nproc_per_node=W pipeline_worker.py SCHEDULE:STYLE:MODE[+OPTION...] [...]

Schedules: gpipe, 1f1b. Styles as of the engine. Options that change a training: see SETTINGS; verified; checkpointed
(blocks); evaluated (after each step), evaluated-within (a logical batch); nan (in some samples); overwritten (inputs,
after the schedule's step); resumed (after a step, on stages and on one process); by-hand (without noise, against one
sample at a time); ddp (two pipelines, so each stage has a replica in DistributedDataParallel), bare (PipelineStage gets
the module in it); fsdp (two pipelines, so each stage has shards on two ranks), unsharded (after forward), apart (no
root unit), hybrid (over nodes, too), over-stages (shards on ranks of other stages), half-ddp (the last stage in DDP),
bfloat16 (parameters in forward); digested (sums are not taken for equal); thin (parts of one row, so more micro-
batches); abandoned (after a batch that is left). Options that are faults: see `told_wrongly`, `faulty`, `changed` and
PLANTED; another-evaluates (a schedule on the same stages).
"""

import math
import os
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpshard import BandMF, PrivacyEngine, QuantileTracking
from dpshard.backends.model_parts import Place
from dpshard.backends.stage_shards import LateUnits, StageShards
from dpshard.backends.stages import Stages
from dpshard.clipping.groups import partition
from dpshard.errors import DpshardError
from dpshard.randomness import derive_key
from dpshard.sampling import PoissonSampler
from dpshard.sampling.plans import plan_micro_batches
from dpshard.step.noise_of_run import NoiseOfRun
from tests import seeds
from tests.distributed.rank import alone, main
from tests.sums import taken_for_equal

D, H, PARTS, ROWS = 4, 6, 4, 2
SECRET = bytes(range(32))
SAMPLES, STEPS = 40, 3
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SETTINGS: dict[str, dict[str, Any]] = {
    "adaptive": {"adaptive_clipping": QuantileTracking()},
    "sums": {"loss_reduction": "sum"},
    "units": {"rows_per_unit": 2},
    "offload": {"offload_records": True},
    "secure": {"secure_mode": True},
    "discrete": {"noise": "discrete-gaussian", "accountant": "rdp"},
    "in-order": {"sampling": "fixed-order"},
    "correlated": {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=2), "accountant": "pld"},
}


def noise_of_replica(self: NoiseOfRun, secret: bytes, *rest: Any, of_step: Any = NoiseOfRun.of_step) -> Any:
    return of_step(self, derive_key(secret, "rank", dist.get_rank()), *rest)


def of_all_pipelines(self: Stages, x: Tensor, gather: Any = Stages.gather) -> Tensor:
    if not x.is_floating_point():  # names and groups, not norms
        return gather(self, x)
    rows = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(rows.view(-1), x.contiguous().view(-1))
    return rows


def add_shards_twice(self: LateUnits, *given: Any, add_shards: Any = LateUnits._add_shards) -> None:
    add_shards(self, *given)
    add_shards(self, *given)


PLANTED: dict[str, Any] = {
    "own-noise": lambda: mock.patch.object(NoiseOfRun, "of_step", noise_of_replica),
    "norms-of-all": lambda: mock.patch.object(Stages, "gather", of_all_pipelines),
    "same-rows": lambda: mock.patch(
        "dpshard.sampling.plans.plan_micro_batches",
        lambda indices, step, size, rank, world_size, **rest: plan_micro_batches(indices, step, size, 0, 2, **rest),
    ),
    "unsummed": lambda: mock.patch("dpshard.backends.stage_sums.WholeSums.sum_rest"),
    "forgotten": lambda: mock.patch.object(LateUnits, "add_later"),
    "twice": lambda: mock.patch.object(LateUnits, "_add_shards", add_shards_twice),
    "noise-by-shard": lambda: mock.patch.object(StageShards, "place", return_value=Place()),
    "unreduced": lambda: mock.patch.object(LateUnits, "end_micro_batch"),
}
"""Faults of pipelines side by side, which give another update."""


class Mixing(torch.autograd.Function):
    """x -> x; backward mixes samples, where no parameter of the stage sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] + gradients[0].mean(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, H), nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A model, or a stage of it, which has a part of its layers."""

    def __init__(self, blocks: int, options: set[str]) -> None:
        super().__init__()
        self.enter: nn.Module | None = nn.Linear(3, D)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(blocks)})
        self.head: nn.Module | None = nn.Linear(D, 2)
        self.checkpointed, self.mixes = "checkpointed" in options, "mixing" in options
        self.time_first = "time-first" in options

    def forward(self, x: Tensor) -> Tensor:
        x = Mixing.apply(x) if self.mixes and self.enter is None else x
        x = x if self.enter is None else self.enter(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.head is None:
            return x.repeat(ROWS, 1, 1) if self.time_first else x
        return self.head(x)


def cut(model: Model, rank: int, size: int) -> None:
    """Make `model` the stage of this rank."""
    each = len(model.blocks) // size
    for i in range(len(model.blocks)):
        if i // each != rank:
            del model.blocks[str(i)]
    model.enter = model.enter if rank == 0 else None
    model.head = model.head if rank == size - 1 else None


def losses_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square() * torch.tensor([1.0, 3.0], dtype=output.dtype)).sum(1)


def loss_of(output: Tensor, target: Tensor, *, sums: bool = False) -> Tensor:
    losses = losses_of(output, target)
    return losses.sum() if sums else losses.mean()


def engine_for(model: nn.Module, style: Any, mode: str, options: set[str], **told: Any) -> PrivacyEngine:
    settings: dict[str, Any] = {"accountant": "gdp", "batch_size": 12, "steps": STEPS}
    for option in options & SETTINGS.keys():
        settings |= SETTINGS[option]
    if settings.get("sampling"):
        settings["batch_size"] = 10
    sigma = 0.0 if "by-hand" in options else 0.3
    engine = PrivacyEngine(
        model,
        sample_size=SAMPLES,
        noise_multiplier=sigma,
        max_grad_norm=12.0,
        clipping_fn="abadi",
        clipping_style=style,
        clipping_mode=mode,
        verify="verified" in options,
        **settings,
        **told,
    )
    seeds.give_secret(engine, SECRET)
    return engine


def data(options: set[str]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, 2) if "units" in options else (SAMPLES,)
    x, y = (torch.randn(*shape, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    if "float32" in options:
        x, y = x.float(), y.float()
    if "nan" in options:
        x[::3] = math.nan
    return TensorDataset(x, y)


def train(
    model: nn.Module, engine: PrivacyEngine, options: set[str], schedule: Any = None, steps: int | None = None
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if "abandoned" in options and schedule is not None:
        abandon(model, engine, options, schedule)
    for logical_batch in engine.batches(data(options), PARTS * (1 if "thin" in options else ROWS), steps=steps):
        for x, y in logical_batch:
            if "flipped" in options:  # copies of the last sample come where samples were
                x, y = x.flip(0), y.flip(0)
            if "repeated" in options and logical_batch.position == 1:  # a row of the first part also in the second
                x, y = (torch.cat([some[:ROWS], some[:1], some[ROWS + 1 :]]) for some in (x, y))
            if schedule is None:
                output = model(x)
                loss_of(output, y, sums="sums" in options).backward()
                engine.record_loss(losses_of(output, y))  # of rows: a mean would have padding's, which pipelines divide
                continue
            if "outside" in options:
                model(torch.ones(len(x), 3 if schedule._stage.is_first else D, dtype=x.dtype))
            if schedule._stage.is_first:
                schedule.step(x)
            elif schedule._stage.is_last:
                engine.record_loss(losses_of(schedule.step(target=y), y))
            else:
                schedule.step()
            if "overwritten" in options:  # what records are made of, as a next forward overwrites it
                received = [info.buffer for some in schedule._stage.args_recv_info.values() for info in some]
                for activation in [x] if schedule._stage.is_first else received:
                    activation.data.mul_(100)
            if "rescaled" in options and logical_batch.complete:
                schedule._stage.scale_grads(2)
            changed(model, logical_batch.position, options)
            if "evaluated-within" in options and not logical_batch.complete:
                evaluate(schedule, {"evaluated"})
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            evaluate(schedule, options)
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics(), "thresholds": engine.thresholds}


def abandon(model: nn.Module, engine: PrivacyEngine, options: set[str], schedule: Any) -> None:
    """Change gradients of a logical batch, and leave it."""
    for logical_batch in engine.batches(data(options), PARTS):
        for x, y in logical_batch:
            schedule.step(*((x,) if schedule._stage.is_first else ()), target=y if schedule._stage.is_last else None)
            changed(model, logical_batch.position, {"amplified"})
        break


def changed(model: nn.Module, position: int, options: set[str]) -> None:
    """Change the sums of the first micro-batch in the body of the loop, in the second one."""
    if position != 2:
        return
    if "amplified" in options:
        for p in model.parameters():
            if p.grad is not None:
                (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).data.mul_(100)
    if "clipped" in options:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def evaluate(schedule: Any, options: set[str]) -> None:
    x, y = (some[: PARTS * ROWS] for some in data(options).tensors)
    inputs = (x,) if schedule._stage.is_first else ()
    if "evaluated" in options:
        schedule.eval(*inputs, target=y if schedule._stage.is_last else None)
    if "another-evaluates" in options:
        ScheduleGPipe(schedule._stage, PARTS).step(*inputs)


def train_by_hand(model: nn.Module, engine: PrivacyEngine) -> None:
    """One sample at a time."""
    x, y = data(set()).tensors
    sampler = PoissonSampler(SAMPLES, engine.mechanism.schedule, SECRET)
    named, optimizer = dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.5)
    groups = engine.mechanism.clipping_groups
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p) for name, p in named.items()}
        for i in sampler.draw(step).tolist():
            loss = loss_of(model(x[i : i + 1]), y[i : i + 1])
            gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
            for names in groups:
                norm = math.hypot(*(float(gradients[name].norm()) for name in names))
                for name in names:
                    sums[name] += min(1.0, 12.0 / math.sqrt(len(groups)) / norm) * gradients[name]
        for name, p in named.items():
            p.grad = sums[name] / 12
        optimizer.step()


def other_draw(draw: Any, self: PoissonSampler, step: int) -> Any:
    return (draw(self, step) + 1) % SAMPLES


def shard(model: Model, options: set[str], mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if "bfloat16" in options else MixedPrecisionPolicy()
    units = [*model.blocks.values(), model]
    if "apart" in options:
        units[-1:] = [module for module in (model.enter, model.head) if module is not None]
    shards = mesh["nodes", "dp"] if "hybrid" in options else mesh["pp" if "over-stages" in options else "dp"]
    for module in units:
        fully_shard(module, mesh=shards, reshard_after_forward="unsharded" not in options, mp_policy=policy)


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def told_wrongly(
    model: Model, options: set[str], mesh: DeviceMesh, undo: ExitStack
) -> tuple[nn.Module, dict[str, Any]]:
    """What the engine is given; with faults that it refuses."""
    given: nn.Module = model
    if "ddp" in options:
        given = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    told: dict[str, Any] = {"*": "stage"}
    if "mixed" in options:
        told = {"*.down.weight": 1, "*": "stage"}
    if "renumbered" in options:
        given = nn.Sequential(*model.blocks.values())
    if "frozen" in options and model.enter is None:
        model.requires_grad_(False)
    if "half-ddp" in options and model.enter is None:
        given = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif "fsdp" in options:
        shard(model, options, mesh)
    if "inner" in options:
        alone = dist.new_subgroups(group_size=1)[0]
        for name, block in model.blocks.items():
            model.blocks[name] = DistributedDataParallel(block, process_group=alone)
    if "own-r" in options:  # each stage forms groups of its own
        undo.enter_context(mock.patch("dpshard.backends.stages.Stages.partition", staticmethod(partition)))
    return given, {"model_parallel_group": mesh["pp"].get_group(), "model_parallel_parts": told}


def faulty(stage: Any, options: set[str], undo: ExitStack) -> None:
    """Plant a fault that all ranks learn of at the release."""
    if "other-draw" in options and not stage.is_first:
        draw = partial(other_draw, PoissonSampler.draw)
        undo.enter_context(mock.patch.object(PoissonSampler, "draw", lambda self, step: draw(self, step)))
    if "lost" in options and stage.is_first:
        backward = stage.backward_one_chunk

        def lose(index: int, *args: Any, **kwargs: Any) -> None:
            if index == 1:
                stage.bwd_cache[index] = ()
            else:
                backward(index, *args, **kwargs)

        stage.backward_one_chunk = lose


def error_of(model: nn.Module, trained: dict[str, Tensor], change: float) -> float:
    return max(float((whole(p) - trained[name]).norm() / change) for name, p in model.named_parameters())


@alone
def train_alone(stages: int, style: str, mode: str, chosen: frozenset[str]) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it ends with."""
    options = set(chosen)
    model = begun(stages, options)
    figures = train(model, engine_for(model, style, mode, options), options)
    return {"figures": figures, "trained": values_of(model)}


def begun(stages: int, options: set[str]) -> Model:
    torch.manual_seed(0)
    return Model(2 * stages, options).to(torch.float32 if "float32" in options else torch.float64)


def train_apart(reference: Model, style: str, mode: str, options: set[str]) -> dict[str, Any]:
    """The same by each rank for itself, rounded as FSDP does it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("apart", "dp"))
    shard(reference, options, mesh)
    with taken_for_equal():
        engine = engine_for(reference, style, mode, options, model_parallel_group=mesh["dp"].get_group())
        figures = train(reference, engine, options)
    return {"figures": figures, "trained": values_of(reference)}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def compare(case: str) -> dict[str, Any]:
    seeds.fix(case)
    kind, style, mode = case.split(":")
    mode, *chosen = mode.split("+")
    options = set(chosen)
    replicas = 2 if options & {"ddp", "fsdp"} else 1
    mesh = init_device_mesh(
        "cpu", (1, replicas, dist.get_world_size() // replicas), mesh_dim_names=("nodes", "dp", "pp")
    )
    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    reference, model = begun(size, options), begun(size, options)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    cut(model, rank, size)
    loss_fn = partial(loss_of, sums="sums" in options)
    with ExitStack() as undo:
        if "digested" not in options:
            undo.enter_context(taken_for_equal())
        for fault in options & PLANTED.keys():
            undo.enter_context(PLANTED[fault]())
        try:
            given, told = told_wrongly(model, options, mesh, undo)
            engine = engine_for(given, style, mode, options, **told)
            staged = given if "ddp" in options and "bare" not in options else model
            stage = PipelineStage(staged, rank, size, torch.device("cpu"), group=mesh["pp"].get_group())
            schedule = SCHEDULES[kind](
                stage, 3 if "uneven" in options else PARTS, loss_fn=loss_fn, scale_grads="scaling" in options
            )
            faulty(stage, options, undo)
            state, halfway = None, {}
            if "resumed" in options:
                train(model, engine, options, schedule, steps=1)
                state, halfway = engine.state_dict(), values_of(model)
                engine.detach()
                engine = engine_for(given, style, mode, options, **told)
                engine.load_state_dict(state)
            found = train(model, engine, options, schedule)
        except (DpshardError, RuntimeError) as error:
            found = {"refused": " ".join(f"{type(x).__name__}: {x}" for x in (error, error.__cause__) if x)}
            if isinstance(error, RuntimeError) and not isinstance(error, DpshardError):  # the others wait for this one
                print(found["refused"], flush=True)
                os._exit(1)
            return found
    if "bfloat16" in options:
        result = train_apart(reference, style, mode, options)
    else:
        result = train_alone(size, style, mode, frozenset(options - {"verified"}))
    expected, trained = result["figures"], result["trained"]
    if "by-hand" in options:
        train_by_hand(reference, engine)
        trained = values_of(reference)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    errors = [error_of(model, trained, change)]
    if state is not None:  # the other half of the run on one process
        again = Model(2 * size, options).double()
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, halfway, group=mesh["pp"].get_group())
        again.load_state_dict({name: p for some in everyone for name, p in some.items()})
        with mock.patch("torch.distributed.is_initialized", return_value=False), taken_for_equal():
            engine = engine_for(again, style, mode, options)
            engine.load_state_dict(state)
            train(again, engine, options)
        errors.append(error_of(again, trained, change))
    return {
        "error": max(errors),
        **{name: [found[name], expected[name]] for name in found},
    }


if __name__ == "__main__":
    main(lambda: [compare(case) for case in sys.argv[1:]])
