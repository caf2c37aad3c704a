"""The real training step of one rank on fake tensors and a fake process group.

All is real, except verification, which needs values, and noise, which costs little. The counted step is not the first,
which also creates optimizer states and probes batch dimensions.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpshard.applications.planner.counts import GRADIENTS, OPTIMIZER, PARAMETERS, RECORDS, Counts
from dpshard.applications.planner.meter import Meter, UnreadValues
from dpshard.applications.planner.models import FakeModel, Transformer, build
from dpshard.applications.planner.parallel import cut_model, grids_unasked, outside_of_modes, replaced
from dpshard.clipping.tape import Tape, Use
from dpshard.config import is_count, parse_clipping_mode
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.interception.batch_dims import Layout

Sharding = Literal["ddp", "zero2", "fsdp2", "hsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A training set-up."""

    model: str | Transformer
    """Preset, hf:NAME_OR_PATH, or shape."""
    ranks: int
    shard: Sharding = "fsdp2"
    """zero2: gathered until backward. hsdp: shards within a node."""
    node: int = 8
    micro_batches: int = 1
    seq: int | None = None
    """Tokens, or pixels along a side."""
    checkpointing: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    tp: int = 1
    cp: int = 1

    @property
    def data_ranks(self) -> int:
        """With samples of their own."""
        return self.ranks // (self.tp * self.cp)


@dataclass(frozen=True, slots=True)
class Clipping:
    """See PrivacyEngine."""

    style: str
    mode: str = "auto"

    @property
    def passes(self) -> int:
        """Backward passes."""
        return parse_clipping_mode(self.mode).backward_passes


@contextmanager
def simulated(setup: Setup) -> Iterator[Simulation]:
    """Yield one rank; raises as `fake_ranks`."""
    with fake_ranks(setup):
        yield Simulation(setup)


@contextmanager
def fake_ranks(setup: Setup) -> Iterator[None]:
    """Make a group that sends nothing. Raises ConfigurationError if one exists, or the mesh does not fit."""
    _require_mesh(setup)
    with fake_group(setup.ranks):
        yield


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Make a group that sends nothing, or raise ConfigurationError."""
    if dist.is_initialized():
        raise ConfigurationError("A plan needs its own process: torch.distributed is initialised already.")
    store = _EveryRankIsHere()  # torch does not keep its Python part alive
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    # The prefix that torch 2.14 puts before the store calls no Python.
    dist.distributed_c10d._world.pg_map[dist.distributed_c10d._get_default_group()] = "fake", store
    try:
        with counting(), outside_of_modes():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def counting() -> Iterator[None]:
    """Ignore warnings of engines without noise."""
    gc.freeze()  # collections in each step skip older objects
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()


def require_counts(**counts: object) -> None:
    """Raise ConfigurationError unless all are positive ints."""
    for name, value in counts.items():
        if not is_count(value):
            raise ConfigurationError(f"{name}={value!r}: give a count, at least 1.")


def _require_mesh(setup: Setup) -> None:
    model_ranks = setup.tp * setup.cp
    if setup.ranks % model_ranks or setup.ranks == model_ranks:
        raise ConfigurationError(
            f"{setup.ranks} ranks cannot hold several models of tp * cp = {model_ranks} ranks each. Choose others."
        )
    if model_ranks > 1 and setup.shard not in ("fsdp2", "zero2"):
        raise ConfigurationError(f"tp and cp are planned with fsdp2 or zero2, not with {setup.shard}.")
    if setup.shard == "hsdp" and (setup.ranks % setup.node or setup.ranks == setup.node):
        raise ConfigurationError(f"hsdp needs several nodes of {setup.node} ranks each, not {setup.ranks} ranks.")


class _EveryRankIsHere(FakeStore):
    """A store in which a rank waits for no other."""

    def add(self, key: str, value: int) -> int:
        return dist.get_world_size()


class Simulation:
    """One rank, within `fake_ranks`."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.fake = setup, FakeTensorMode(allow_non_fake_inputs=True)
        self.meter = meter = Meter(self.fake, setup.node)
        self._stepped = False
        self._layouts: dict[Any, Layout] = {}
        self._told: dict[str, Any] = {}
        # FSDP's policy casts parameters.
        narrow = setup.shard == "ddp" and setup.precision == "bf16"
        self._autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=narrow)
        mesh = self._mesh()
        # Under context parallelism, ranks of one model have shards of their own.
        ranks = mesh["shard", "cp"]._flatten("ranks") if setup.cp > 1 else mesh["shard"] if setup.tp > 1 else mesh
        with self.fake, UnreadValues(), meter:
            self.subject = self._build()
            self.elements = sum(p.numel() for p in self.subject.model.parameters())
            if setup.tp * setup.cp > 1:
                self.subject = cut_model(self.subject, mesh, tp=setup.tp, cp=setup.cp)
                group = mesh["tp" if setup.tp > 1 else "cp"].get_group()
                meter.waited = dist.get_process_group_ranks(group)
                if setup.cp > 1:
                    self._told = {"model_parallel_group": group, "model_parallel_parts": {"*": "sum"}}
            self.model = self._shard(self.subject, ranks)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            # They read no values. DTensors have no fused SGD.
            make = partial(torch.optim.AdamW, fused=True) if setup.optimizer == "adamw" else torch.optim.SGD
            self.optimizer = make(parameters, lr=1e-3)
            meter.label(self.model.parameters(), PARAMETERS)
            self.shard_elements = sum(getattr(p, "_local_tensor", p).numel() for p in self.model.parameters())
            _, targets = self.subject.inputs(1)
        self.positions = targets.numel() * setup.cp

    def _build(self) -> FakeModel:
        setup = self.setup
        make = setup.model.build if isinstance(setup.model, Transformer) else partial(build, setup.model)
        return make(seq=setup.seq, checkpointing=setup.checkpointing)

    def _mesh(self) -> Any:
        setup = self.setup
        if setup.shard == "ddp":
            return None
        sizes = {"shard": setup.data_ranks}
        if setup.shard == "hsdp":
            sizes = {"replicate": setup.ranks // setup.node, "shard": setup.node}
        elif setup.tp * setup.cp > 1:
            sizes |= {"cp": setup.cp, "tp": setup.tp}
        return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _shard(self, subject: FakeModel, mesh: Any) -> nn.Module:
        if self.setup.shard == "ddp":
            return _distributed_data_parallel(subject.model)
        narrow: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**narrow if self.setup.precision == "bf16" else {})
        for unit in (*subject.blocks, subject.model):
            # None: FSDP reshards blocks after forward, but not the root.
            kept = False if self.setup.shard == "zero2" else None
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
        return subject.model

    def count(self, clipping: Clipping | None, micro_batch: int) -> Counts:
        """Return the costs of a step."""
        rows = micro_batch * self.setup.data_ranks * self.setup.micro_batches
        engine = None if clipping is None else self._engine(clipping, rows)
        try:
            with self.fake, UnreadValues(), self.meter, replaced(Tape, "arrive", self._noting(Tape.arrive)):
                for batch in self._ordinary() if engine is None else engine.batches(range(rows), micro_batch):
                    before = self._stepped, len(self._layouts)
                    self._step(batch, micro_batch)
                    if before == (True, len(self._layouts)):
                        break
        finally:
            if engine is not None:
                engine.detach()
        return self.meter.counts

    def _engine(self, clipping: Clipping, rows: int) -> PrivacyEngine:
        with grids_unasked():
            engine = PrivacyEngine(
                self.model,
                # Every row is in every batch: each rank has setup.micro_batches.
                batch_size=rows,
                sample_size=rows,
                steps=2,
                noise_multiplier=0.0,
                target_delta=1e-12,
                accountant="rdp",
                clipping_style=clipping.style,
                clipping_mode=clipping.mode,
                verify=False,
                **self._told,
            )
        engine._interception.layouts.found = self._layouts  # which all engines of this model share
        return engine

    def _noting(self, arrive: Callable[..., None]) -> Callable[..., None]:
        def noted(tape: Tape, use: Use, tensors: Sequence[Tensor | None]) -> None:
            arrive(tape, use, tensors)
            self._note(tape, use)

        return noted

    def _note(self, tape: Tape, use: Use) -> None:
        """Label the records that a use has made."""
        for name in {name for source in use.sources for name in source.roots}:
            for _, record in tape.closer.group(name).entries.get(name, ()):
                fields = (getattr(record, field) for field in type(record).__slots__)
                self.meter.label([x for x in fields if isinstance(x, Tensor)], RECORDS)

    def _ordinary(self) -> Iterator[Iterator[None]]:
        while True:
            yield self._micro_batches()

    def _micro_batches(self) -> Iterator[None]:
        for i in range(self.setup.micro_batches):
            held = isinstance(self.model, DistributedDataParallel) and i < self.setup.micro_batches - 1
            with self.model.no_sync() if held else nullcontext():  # type: ignore[operator]
                yield

    def _step(self, logical_batch: Iterable[Any], micro_batch: int) -> None:
        inputs, targets = self.subject.inputs(micro_batch)
        # Tensors in reference cycles would count until Python collects them.
        gc.collect()
        self.meter.restart()
        for _ in logical_batch:
            self.meter.phase = "forward"
            with self.subject.around_step():
                with self._autocast():
                    loss = self.subject.loss(self.model(**inputs), targets)
                self.meter.phase = "backward"
                loss.backward()
                del loss
        self._update()

    def _update(self) -> None:
        self.meter.phase = "update"
        self.meter.label([p.grad for p in self.model.parameters()], GRADIENTS)
        self.optimizer.step()
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        self.meter.label([x for x in states if isinstance(x, Tensor)], OPTIMIZER)
        self.optimizer.zero_grad()
        self._stepped = True


def _distributed_data_parallel(model: nn.Module) -> DistributedDataParallel:
    """Return DDP that does not read or await fake tensors."""
    ddp = _UnhookedDDP(model, init_sync=False)

    def reduce(group, bucket):  # DDP rejects postponed annotations
        total = bucket.buffer().div_(dist.get_world_size())
        dist.all_reduce(total)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(total)
        return done

    ddp.register_comm_hook(None, reduce)
    ddp.reducer = _Reducer(ddp.reducer)  # type: ignore[assignment]
    return ddp


class _UnhookedDDP(DistributedDataParallel):
    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


class _Reducer:
    """Keeps the first buckets; a rebuild would broadcast them."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
