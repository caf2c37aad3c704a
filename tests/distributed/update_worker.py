"""One rank of sharded trainings; run by torchrun, compares each with the same training in one process, prints JSON.

Usage: torchrun --nproc_per_node=W update_worker.py BACKEND:STYLE:MODE[+OPTION...] [...]

Backends: ddp, zero1 (DDP with ZeroRedundancyOptimizer), fsdp2, fsdp2-kept (reshard_after_forward=False), fsdp2-root
(one unit), fsdp2-idle (a unit that never runs), fsdp2-list (the last norm and the tied weight in one unit, as
accelerate has them), fsdp2-offload (CPUOffloadPolicy), hsdp. Options, for the sharded side alone: checkpoint
(non-reentrant), wrapper (torch's checkpoint_wrapper), selective (the same, which keeps every second
matrix product, as torchtitan's does), compile (every block, by inductor), traced
(every block, compiled by aot_eager), unsynced (gradients reduced
in the last micro-batch alone), verified (the engine verifies the model). For both sides: thawed (a block is trained
every second step); lengths (texts of several lengths, each micro-batch as long as its longest); signsgd or adafactor,
optimizers of little memory; tracked, adaptive thresholds; grid, discrete Gaussian noise; complex, a filter of complex
numbers in every block; hf, transformers' GPT-2, with its own gradient checkpointing where sharded.
"""

import math
import sys
from collections.abc import Iterable, Set
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine, QuantileTracking
from dpshard.names import canonical_name
from tests import seeds
from tests.distributed.rank import alone, main
from tests.networks import every_second_product
from tests.sums import taken_for_equal

SECRET = bytes(range(32))
SAMPLES, STEPS, PAD = 60, 3, 0
SEEN_ALONE = {"hf", "complex", "lengths", "thawed", "tracked", "grid", "signsgd", "adafactor"}
"""Options for both sides."""


class Filter(nn.Module):
    """A spectral filter; FSDP gathers parameters of one dtype together, so it is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=x.shape[-1])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "filter"):
            x = self.filter(x)
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * (1 + self.gain)


class Model(nn.Module):
    """Tied embedding and head, positions, an idle layer, odd sizes: uneven and empty shards on 2 and 4 ranks."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.randn(9, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.idle = nn.Linear(width, 2)
        self.log_scale = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x) * self.log_scale.exp())

    def last(self) -> list[nn.Module]:
        return [self.norm, self.embedding, self.head]


def filtering() -> Model:
    model = Model()
    for block in model.blocks:
        block.filter = Filter()
    return model


class GPT2(nn.Module):
    """transformers' GPT-2, tied, as in `Model`."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=11, n_positions=9, n_embd=6, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.core = GPT2LMHeadModel(config)
        self.blocks = self.core.transformer.h
        self.checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        return self.core(ids).logits

    def last(self) -> list[nn.Module]:
        return [self.core.transformer.ln_f, self.core.transformer.wte, self.core.lm_head]


def shard(model: Model | GPT2, backend: str) -> nn.Module:
    if backend in ("ddp", "ddp-used", "zero1"):
        return DistributedDataParallel(model, find_unused_parameters=backend != "ddp-used")
    world = dist.get_world_size()
    if backend == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = None  # each call makes one of its own, as most scripts do
    offload = CPUOffloadPolicy(pin_memory=False) if backend == "fsdp2-offload" else OffloadPolicy()
    kept = backend == "fsdp2-kept"
    for filter in (module for module in model.modules() if isinstance(module, Filter)):
        fully_shard(filter, mesh=mesh)
    for block in model.blocks if backend != "fsdp2-root" else ():
        fully_shard(block, mesh=mesh, reshard_after_forward=not kept, offload_policy=offload)
    if backend == "fsdp2-idle":
        fully_shard(model.idle)
    if backend == "fsdp2-list":
        fully_shard(model.last())
    return fully_shard(model, mesh=mesh, offload_policy=offload)


def prepare(model: Model | GPT2, options: set[str]) -> Model | GPT2:
    model.checkpointed = "checkpoint" in options
    if isinstance(model, GPT2) and model.checkpointed:
        model.core.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for i, block in enumerate(model.blocks):
        if "wrapper" in options:
            block = model.blocks[i] = checkpoint_wrapper(block)
        if "selective" in options:
            block = model.blocks[i] = checkpoint_wrapper(block, context_fn=every_second_product)
        if "compile" in options or "traced" in options:
            block.compile(fullgraph=True, backend="inductor" if "compile" in options else "aot_eager")
    return model


class SignSGD(torch.optim.Optimizer):
    """p <- p - lr * sign(gradient): no state at all."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def optimizer_of(model: nn.Module, backend: str, options: set[str]) -> torch.optim.Optimizer:
    if backend == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, momentum=0.5)
    if "signsgd" in options:
        return SignSGD(model.parameters(), lr=0.1)
    if "adafactor" in options:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def train(
    model: nn.Module, style: str, mode: str, micro_batch_size: int, backend: str, options: set[str], *, verify: bool
) -> dict[str, Any]:
    """Figures of the training."""
    dataset = texts("lengths" in options)
    engine = PrivacyEngine(
        model,
        batch_size=20,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        clipping_fn="abadi",
        clipping_style=style,  # type: ignore[arg-type]
        clipping_mode=mode,
        noise="discrete-gaussian" if "grid" in options else "gaussian",
        accountant="rdp" if "grid" in options else "gdp",  # which takes no time
        adaptive_clipping=QuantileTracking(learning_rate=0.5, budget_share=0.1) if "tracked" in options else None,
        verify=verify,
    )
    seeds.give_secret(engine, SECRET)
    optimizer = optimizer_of(model, backend, options)
    core = model.module if isinstance(model, DistributedDataParallel) else model
    for logical_batch in engine.batches(dataset, micro_batch_size, collate_fn=padded if "lengths" in options else None):
        if "thawed" in options:
            core.blocks[1].requires_grad_(logical_batch.step % 2 == 1)  # type: ignore[index]
        for x, y in logical_batch:
            if "unsynced" in options and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(logical_batch.complete)
            counts = (x != PAD).unsqueeze(2)
            losses = F.cross_entropy((model(x) * counts).sum(1) / counts.sum(1), y, reduction="none")
            engine.record_loss(losses)
            losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics(), "thresholds": engine.thresholds}


def texts(of_several_lengths: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (SAMPLES, 7 if of_several_lengths else 4), generator=generator)
    labels = torch.randint(0, 11, (SAMPLES,), generator=generator)
    if not of_several_lengths:
        return TensorDataset(ids, labels)
    return [(row[: 2 + i % 6], label) for i, (row, label) in enumerate(zip(ids, labels, strict=True))]


def padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*rows, strict=True)
    return pad_sequence(ids, batch_first=True, padding_value=PAD), torch.stack(labels)


def whole(model: nn.Module) -> dict[str, Tensor]:
    core = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        canonical_name(name): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in core.named_parameters()
    }


@alone
def train_alone(style: str, mode: str, options: frozenset[str]) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it begins and ends with."""
    model = begun(options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    figures = train(model, style, mode, 7, "none", set(options), verify=False)
    return {**figures, "before": before, "trained": {name: p.detach() for name, p in model.named_parameters()}}


def begun(options: Set[str]) -> Model | GPT2:
    torch.manual_seed(0)
    build = GPT2 if "hf" in options else filtering if "complex" in options else Model
    return build().double()


def compare(case: str) -> dict[str, object]:
    seeds.fix(case)  # whatever has run before it in this process
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    backend, style, mode = case.split(":")
    mode, *chosen = mode.split("+")
    options = set(chosen)
    sharded = shard(prepare(begun(options), options), backend)
    found = train(sharded, style, mode, 4, backend, options, verify="verified" in options)
    expected = train_alone(style, mode, frozenset(options & SEEN_ALONE))
    before, trained, parameters = expected["before"], expected["trained"], whole(sharded)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    return {
        "error": max(float((parameters[n] - p).norm() / change) for n, p in trained.items()),
        "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        **{name: [found[name], expected[name]] for name in ("epsilon", "metrics", "thresholds")},
    }


if __name__ == "__main__":
    with taken_for_equal():  # which they are but for rounding
        main(lambda: [compare(case) for case in sys.argv[1:]])
