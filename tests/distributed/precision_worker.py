"""One rank of a step in half precision whose exact clipped sum is known; see test_mixed_precision.py.

Usage: torchrun --nproc_per_node=W precision_worker.py CASE [CASE ...], a case is BACKEND:HALF:STYLE:DTYPE.

All numbers of the network are small integers, so activations and output gradients are exact in half precision, and
whatever is rounded before the noise shows against float32.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.names import canonical_name
from tests.distributed.rank import main

SAMPLES, WIDTH, THRESHOLD, BATCH_SIZE = 40, 5, 0.7, 30


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1, bias=False), nn.Linear(WIDTH + 1, 3, bias=False))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(integers(i, *p.shape))
    return model


def data() -> tuple[Tensor, Tensor]:
    return integers(10, SAMPLES, WIDTH), integers(11, SAMPLES, 3)


def exact(chosen: list[int], style: str) -> dict[str, Tensor]:
    """The clipped sum by autograd, one sample at a time, in float64, over the expected batch size."""
    model = network().double()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in chosen:
        x, s = (t[i : i + 1] for t in data())
        gradients = dict(zip(total, torch.autograd.grad((model(x) * s).sum(), list(model.parameters())), strict=True))
        groups = [list(total)] if style == "all-layer" else [[name] for name in total]
        for group in groups:
            norm = torch.cat([gradients[name].flatten() for name in group]).norm()
            for name in group:
                total[name] += min(1.0, THRESHOLD / len(groups) ** 0.5 / max(float(norm), 1e-30)) * gradients[name]
    return {name: x / BATCH_SIZE for name, x in total.items()}


def step(backend: str, half: str, style: str, dtype: torch.dtype) -> dict[str, object]:
    model: nn.Module = network()
    if half == "parameters":
        model = model.to(dtype)
    policy = MixedPrecisionPolicy()
    if half == "policy":
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    elif half == "policy-narrow":
        policy = MixedPrecisionPolicy(param_dtype=dtype)
    if backend == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for layer in list(model.children()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        model = fully_shard(model, mesh=mesh, mp_policy=policy)
    engine = PrivacyEngine(
        model, batch_size=BATCH_SIZE, sample_size=SAMPLES, steps=1, noise_multiplier=0.0, max_grad_norm=THRESHOLD,
        clipping_fn="abadi", clipping_style=style,  # type: ignore[arg-type]
        verify=style == "all-layer",
    )  # fmt: skip
    engine._secret = bytes(range(32))  # the same logical batch in every run of the tests
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, s = data()
    drawn: set[int] = set()
    for logical_batch in engine.batches(TensorDataset(x.float(), s.float(), torch.arange(SAMPLES)), 4):
        for x_B, s_B, index_B in logical_batch:
            drawn.update(index_B[~logical_batch.is_padding].tolist())
            autocast = torch.autocast("cpu", dtype) if half == "autocast" else contextlib.nullcontext()
            with autocast:
                output = model(x_B.to(dtype) if half == "parameters" else x_B)
            (output.float() * s_B).sum(1).mean().backward()
        optimizer.step()
        gradients = {canonical_name(n).removeprefix("module."): whole(p.grad) for n, p in model.named_parameters()}
        dtypes = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        optimizer.zero_grad()
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(drawn))
    expected = exact(sorted(i for part in everyone for i in part), style)
    return {
        "error": max(float((gradients[n] - x).norm() / x.norm()) for n, x in expected.items()),
        "roundings": max(float(((gradients[n] - x).abs() / half_ulp(x, dtype)).max()) for n, x in expected.items()),
        "dtypes": sorted(dtypes),
    }


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of one rounding of `x` to `dtype`; below its smallest normal number, all are equidistant."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp_min(info.smallest_normal))
    return info.eps / 2 * torch.ldexp(torch.ones_like(x), exponent - 1)


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).double()  # type: ignore[operator]


def run(case: str) -> dict[str, object]:
    backend, half, style, dtype = case.split(":")
    return step(backend, half, style, getattr(torch, dtype))


if __name__ == "__main__":
    main(lambda: [run(case) for case in sys.argv[1:]])
