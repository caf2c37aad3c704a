"""Checks of DeepSpeed's back-end that are no comparison of trainings.

A case is CHECK:STAGE[+FLAG...]. Every check raises, or returns figures that the test judges.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.errors import DpshardError
from dpshard.noise.keyed import KeyedGaussian
from tests.distributed.deepspeed_setup import configuration, deepspeed, masters, start, whole
from tests.noise.sampled import sampled
from tests.oracle import factor, norm, per_sample_gradients, ramp_loss
from tests.sums import noise_secret, taken_for_equal

SECRET = bytes(range(32))
SGD = torch.optim.SGD


def engine_on(model_engine: nn.Module, **options: Any) -> PrivacyEngine:
    defaults = {"batch_size": 8, "sample_size": 64, "steps": 100, "noise_multiplier": 1.0, "clipping_fn": "abadi"}
    engine = PrivacyEngine(model_engine, **{**defaults, **options})
    engine._secret = SECRET
    return engine


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def begin(model: nn.Module, stage: int, *flags: str, **options: Any) -> tuple[Any, PrivacyEngine]:
    model_engine = start(model, configuration(stage, *flags), SGD(model.parameters(), lr=1.0))
    return model_engine, engine_on(model_engine, **options)


def rows(model: nn.Module, n: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(n, 4, generator=generator, dtype=next(model.parameters()).dtype)


def refused(call: Callable[[], Any]) -> str:
    """Kind and text of the error that `call` raises."""
    try:
        call()
    except DpshardError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


# --- noise --------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Odd sizes, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(61, 67), nn.Linear(67, 31), nn.Linear(61, 43)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def noise(stage: int, *flags: str) -> dict[str, Any]:
    """What a step adds where all gradients are zero, over the promised deviation."""
    torch.manual_seed(0)
    model = Wide()
    for p in model.parameters():
        p.data.zero_()  # the rounding of the parameters is no part of the noise
    model_engine, _ = begin(model, stage, *flags, batch_size=5, noise_multiplier=0.7, max_grad_norm=3.0, verify=False)
    x = torch.randn(4, 61, dtype=next(model.parameters()).dtype)
    with taken_for_equal():
        model_engine.backward((model_engine(x) * 0.0).sum())
        model_engine.step()
    steps = {name: -p.double() * 5 / (0.7 * 3.0) for name, p in masters(model).items()}
    drawn = KeyedGaussian(noise_secret(SECRET, 0, 0.7 * 3.0))
    error = max(
        float((z.flatten() - sampled(drawn, 0, n, 0, z.numel()).double()).abs().max()) for n, z in steps.items()
    )
    flat = torch.cat([z.flatten() for z in steps.values()])
    a, b = steps["first.weight"].flatten().chunk(2)  # on two ranks under stage 3
    return {
        "elements": len(flat),
        "square": float(flat.square().sum()),
        "error": error,
        "correlation": float(torch.corrcoef(torch.stack([a[: len(b)], b]))[0, 1]) * len(b) ** 0.5,
    }


# --- sums ---------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A layer that runs on the first rank alone, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.own = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        return self.own(x) if dist.get_rank() == 0 else x


class Tied(nn.Module):
    """A head that borrows the weight of another module, and derivations of parameters, one across modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 6, bias=False)
        self.a, self.b = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) * self.scale.exp()
        x = F.linear(x, torch.cat([self.a.weight, self.b.weight])) + self.a(x).repeat(1, 2) + self.b(x).repeat(1, 2)
        return F.linear(x, self.embedding.weight.t())


def oracle(stage: int, build: Callable[[], nn.Module] = Branching, style: str = "all-layer") -> dict[str, Any]:
    """Error of a noiseless update, of ranks that use other layers, against one sample at a time."""
    torch.manual_seed(0)
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    singles = per_sample_gradients(model, [rows(model)])
    threshold = sorted(norm(g) for g in singles)[1]
    dist.broadcast_object_list(found := [threshold])
    (threshold,) = found
    total = {name: torch.zeros_like(p) for name, p in before.items()}
    for single in singles:
        c = factor(norm(single), threshold, "abadi")
        for name, g in single.items():
            total[name] += c * g
    for g in total.values():
        dist.all_reduce(g)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_engine, engine = begin(model, stage, noise_multiplier=0.0, max_grad_norm=threshold, clipping_style=style)
    model_engine.backward(ramp_loss(model_engine(rows(model))))
    model_engine.step()
    after = whole(model)
    error = sum(float((before[n] - after[n] - total[n] / 8).square().sum()) for n in total) ** 0.5
    dist.all_reduce(clipped := torch.tensor(engine.metrics()["clip_fraction"]))
    return {"error": error / (norm(total) / 8), "clipped": float(clipped) / dist.get_world_size()}


def tied(stage: int) -> dict[str, Any]:
    return oracle(stage, Tied)


# --- guards -------------------------------------------------------------------------------------------------------


class _Invisible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return _Invisible.apply(self.first(x), self.weight)


def leak(stage: int) -> dict[str, Any]:
    """A gradient that no rule has seen; and that nothing of it is stepped with afterwards."""
    torch.manual_seed(0)
    model = OwnFunction()
    model_engine, _ = begin(model, stage, verify=False)
    before = masters(model)
    text = refused(lambda: model_engine.backward(ramp_loss(model_engine(rows(model)))))
    moved = max(float((p - before[n]).abs().max()) for n, p in masters(model).items())
    verified, _ = begin(OwnFunction(), stage)
    return {"error": text, "moved": moved, "verified": refused(lambda: verified(rows(model)))}


def order(stage: int) -> dict[str, Any]:
    """Steps that would not be private, or not be those of a logical batch."""
    model = small()
    model_engine, engine = begin(model, stage)
    zero = model_engine.optimizer

    def step_directly() -> None:  # past DeepSpeed, and what it thinks of when to step
        if stage == 3:
            zero.optimizer.param_groups[0]["params"] = list(zero.fp32_partitioned_groups_flat)
        zero.optimizer.step()

    def work(batch: Any, limit: int = 100) -> None:
        for _, (x,) in zip(range(limit), batch, strict=False):
            model_engine.backward(ramp_loss(model_engine(x)))

    def batches() -> Any:
        return engine.batches(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0))), 1)

    started = batches()
    work(next(started), limit=1)
    found: dict[str, Any] = {"half": refused(step_directly)}
    started = batches()
    work(next(started))
    before = masters(model)
    model_engine.step()
    found["moved"] = min(float((p - before[n]).abs().max()) for n, p in masters(model).items())
    found["twice"] = refused(step_directly)
    work(next(started))
    engine.privatize()
    engine.privatize()
    found["ledger"] = engine.step
    batch = next(started)
    found["unstepped"] = refused(lambda: work(batch))
    return found


def start_up(stage: int) -> dict[str, Any]:
    """verify() by hand, and the end: parameters, gradients and DeepSpeed's training are as they were."""
    plain, model = small(), small()
    reference = start(plain, configuration(stage), SGD(plain.parameters(), lr=0.1))
    model_engine = start(model, configuration(stage), SGD(model.parameters(), lr=0.1))
    engine = engine_on(model_engine)
    state = torch.random.get_rng_state()
    engine.verify(rows(plain))
    same_state = torch.equal(state, torch.random.get_rng_state())
    partitioned = stage < 3 or all(p.numel() == 0 for p in model.parameters())
    model_engine(rows(plain))  # verified, and abandoned
    engine.detach()
    for _ in range(3):
        for trained in (reference, model_engine):
            trained.backward(ramp_loss(trained(rows(plain))))
            trained.step()
    expected = whole(plain)
    error = max(float((p - expected[n]).abs().max()) for n, p in whole(model).items())
    return {"same_state": same_state, "partitioned": partitioned, "error": error}


class Reentrant(nn.Module):
    """Activation checkpointing of DeepSpeed's own, which is reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return deepspeed.checkpointing.checkpoint(self.second, self.first(x))


def reentrant(stage: int) -> dict[str, Any]:
    """What verification says of it, and what backward says without."""
    verified, _ = begin(Reentrant(), stage)
    trained, _ = begin(Reentrant(), stage, verify=False)
    deepspeed.checkpointing.configure(None, num_checkpoints=1)
    return {
        "verified": refused(lambda: verified(rows(verified))),
        "backward": refused(lambda: trained.backward(ramp_loss(trained(rows(trained))))),
    }


def resume(stage: int) -> dict[str, Any]:
    """Two steps, and the same two with a new process (as far as the objects go) between them."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dataset = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def make() -> tuple[nn.Module, Any, PrivacyEngine]:
        model = small()
        model_engine = start(model, configuration(stage), torch.optim.AdamW(model.parameters(), lr=0.1))
        return model, model_engine, engine_on(model_engine)

    def work(model_engine: Any, engine: PrivacyEngine, steps: int) -> None:
        for _, batch in zip(range(steps), engine.batches(dataset, 4), strict=False):
            for (x,) in batch:
                model_engine.backward(ramp_loss(model_engine(x)))
            model_engine.step()

    model, model_engine, engine = make()
    work(model_engine, engine, 2)
    expected = whole(model)
    _, model_engine, engine = make()
    work(model_engine, engine, 1)
    model_engine.save_checkpoint(folder[0])
    state = engine.state_dict()
    model, model_engine, engine = make()
    model_engine.load_checkpoint(folder[0])
    engine.load_state_dict(state)
    work(model_engine, engine, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    error = max(float((p - expected[n]).abs().max()) for n, p in whole(model).items())
    return {"error": error, "step": engine.step}


class Assorted(nn.Module):
    """What a checkpoint may meet: single numbers, frozen and tied parameters, buffers, no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("offset", torch.rand(7))
        self.register_buffer("nothing", torch.rand(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.frozen(x)) + self.offset)
        return self.tied(self.second(hidden)) * self.scale


def checkpoints(stage: int) -> dict[str, Any]:
    """What comes back from a checkpoint, and what is refused, with nothing changed."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    x = rows(small())

    def make(seed: int, optimizer: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, Any, Checkpointer]:
        torch.manual_seed(seed)
        model = Assorted()
        model_engine = start(model, configuration(stage), optimizer(model.parameters(), lr=0.1, **options))
        return model, model_engine, Checkpointer(folder[0], engine_on(model_engine), model_engine.optimizer)

    def step(model_engine: Any) -> None:
        model_engine.backward(ramp_loss(model_engine(x)))
        model_engine.step()

    def state(model: nn.Module, model_engine: Any) -> list[Tensor]:
        flat = model_engine.optimizer.optimizer.state.values()
        buffers = [model.offset, *(torch.as_tensor(v) for values in flat for _, v in sorted(values.items()))]
        return [t.detach().clone() for t in [*whole(model).values(), *masters(model).values(), *buffers]]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    trained = make(0, torch.optim.AdamW)
    step(trained[1])
    trained[2].save(wait=False)
    expected = state(*trained[:2])
    with torch.no_grad():
        output = trained[1](x)
    step(trained[1])  # while it is written
    trained[2].wait()
    fresh, used = make(1, torch.optim.AdamW), make(2, torch.optim.AdamW)
    step(used[1])  # its optimizer remembers something already
    found: dict[str, Any] = {"differed": not same(expected, state(*used[:2]))}
    for name, (model, model_engine, checkpointer) in {"fresh": fresh, "used": used}.items():
        checkpointer.load()
        found[name] = same(expected, state(model, model_engine))
        with torch.no_grad():  # also what forward sees
            found[name] &= torch.equal(model_engine(x), output)
    other = make(3, SGD, momentum=0.9)
    before = state(*other[:2])
    found["another optimizer"] = refused(other[2].load)
    found["unchanged"] = same(before, state(*other[:2]))
    for remembered in trained[1].optimizer.optimizer.state.values():
        remembered["histogram"] = torch.zeros(3)  # of the partition as a whole
    found["unsplittable"] = refused(trained[2].save)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


def memory(stage: int) -> dict[str, Any]:
    """Whether gathered parameters outlive their module's forward, for the sake of backward."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model_engine, _ = begin(model, stage)
    x = rows(model)
    for _ in range(2):
        seen: list[StorageWeakRef] = []
        handles = [
            layer.register_forward_hook(
                lambda layer, *_, seen=seen: seen.append(StorageWeakRef(layer.weight.untyped_storage())), prepend=True
            )
            for layer in model
            if isinstance(layer, nn.Linear)
        ]
        loss = ramp_loss(model_engine(x))
        alive = sum(not reference.expired() for reference in seen)
        for handle in handles:
            handle.remove()
        model_engine.backward(loss)
        model_engine.step()
    return {"alive": alive, "seen": len(seen)}


# --- refusals -----------------------------------------------------------------------------------------------------


def refusals(stage: int) -> dict[str, Any]:
    def with_config(optimizer: Any = None, **changes: Any) -> str:
        model = small()
        optimizer = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
        config = {key: value for key, value in (configuration(stage) | changes).items() if value is not None}
        model_engine = start(model, config, optimizer)
        message = refused(lambda: engine_on(model_engine))
        assert not any(p._backward_hooks for p in model.parameters()), "a refused engine left its hooks"
        return message

    zero = configuration(stage)["zero_optimization"]
    found: dict[str, Any] = {
        "accumulation": with_config(gradient_accumulation_steps=2),
        "clipping": with_config(gradient_clipping=0.5),
        "default clipping": with_config(gradient_clipping=None),
        "stage 0": with_config(zero_optimization={"stage": 0}),
        "muon": with_config(optimizer=lambda model: Muonic(model.parameters(), lr=0.1)),
    }
    if stage == 3:
        found["hpz"] = with_config(zero_optimization=zero | {"zero_hpz_partition_size": dist.get_world_size()})
    model = small()
    model_engine = start(model, configuration(stage), SGD(model.parameters(), lr=0.1))
    with mock.patch.object(model_engine, "fp16_enabled", return_value=True):  # DeepSpeed has no fp16 on the CPU
        found["fp16"] = refused(lambda: engine_on(model_engine))
    replicated = DistributedDataParallel(small())
    found["DDP"] = refused(
        lambda: engine_on(start(replicated, configuration(stage), SGD(replicated.parameters(), lr=0.1)))
    )
    nvme = deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig(device="nvme")
    with mock.patch.object(model_engine, "zero_offload_optimizer", return_value=nvme):
        found["nvme"] = refused(lambda: engine_on(model_engine))
    with mock.patch.object(model_engine, "mp_world_size", 2):
        found["parallel model"] = refused(lambda: engine_on(model_engine))
    found["not the engine"] = refused(lambda: engine_on(model))
    if stage == 3:
        found["two passes"] = refused(lambda: engine_on(model_engine, clipping_mode="ghost"))
    begun, private = begin(small(), stage)
    found["checkpointer"] = refused(lambda: Checkpointer("nowhere", private, SGD(small().parameters(), lr=0.1)))
    with mock.patch.object(begun.optimizer, "partial_offload", 0.5, create=True):
        found["half offloaded"] = refused(lambda: Checkpointer("nowhere", private, begun.optimizer))
    idle = deepspeed.initialize(model=small(), config=configuration(stage) | {"zero_optimization": {"stage": 0}})[0]
    with mock.patch.object(idle, "zero_optimization_stage", return_value=stage):
        found["without optimizer"] = refused(lambda: engine_on(idle))
    onebit = configuration(stage, optimizer={"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 2}})
    try:
        found["1-bit Adam"] = refused(lambda: engine_on(start(small(), onebit, None)))
    except (AttributeError, AssertionError) as error:  # DeepSpeed's own
        found["1-bit Adam"] = f"{type(error).__name__}: {error}"
    left_out = small()
    optimizer = SGD(left_out[0].parameters(), lr=0.1)
    half = deepspeed.initialize(model=left_out, optimizer=optimizer, config=configuration(stage))[0]
    found["not optimized"] = refused(lambda: engine_on(half))
    moved = small()
    moved_engine = start(moved, configuration(stage), SGD(moved.parameters(), lr=0.1))
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    getattr(moved_engine.optimizer, name)[0].data.add_(1.0)
    found["another layout"] = refused(lambda: engine_on(moved_engine))
    lonely = small()
    optimizer = SGD(lonely.parameters(), lr=0.1)
    lone = deepspeed.initialize(model=lonely, optimizer=optimizer, config=configuration(stage), mpu=Alone())[0]
    deepspeed.utils.groups.mpu = None  # it would hold for all models of the process
    found["some ranks"] = refused(lambda: engine_on(lone))
    return found


class Alone:
    """What tells DeepSpeed that this rank shares its data with no other one, and leaves open what they do."""

    def __init__(self) -> None:
        self.group = dist.new_subgroups(group_size=1)[0]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    get_model_parallel_group = get_data_parallel_group

    def get_data_parallel_rank(self) -> int:
        return 0

    get_model_parallel_rank = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        return 1

    get_model_parallel_world_size = get_data_parallel_world_size


class Muonic(SGD):
    """Stands for Muon, which needs an accelerator's kernels."""


Muonic.__name__ = "MuonWithAuxAdam"

CHECKS = (noise, oracle, tied, leak, order, reentrant, start_up, resume, checkpoints, memory, refusals)


def run(case: str) -> dict[str, Any]:
    name, stage, *flags = case.replace("+", ":").split(":")
    check = next(check for check in CHECKS if check.__name__ == name)
    return {"case": case, **check(int(stage), *flags)}
