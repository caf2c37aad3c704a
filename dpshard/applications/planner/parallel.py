"""Parallelism of the planner's GPTs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _disable_current_modes

from dpshard.applications.planner.models import FakeModel
from dpshard.applications.transformer import GPT, Attention, Block
from dpshard.backends import grid
from dpshard.backends.communicator import Communicator
from dpshard.backends.model_parts import ModelParts
from dpshard.errors import ConfigurationError


def cut_model(subject: FakeModel, mesh: DeviceMesh, *, tp: int, cp: int) -> FakeModel:
    """Return `subject` with its model cut over "tp" of `mesh`, or its samples over "cp".

    Raises ConfigurationError unless it is a GPT with a head of its own, and the ranks divide its sizes.
    """
    model = subject.model
    if tp > 1 and cp > 1:
        raise ConfigurationError("tp and cp together are not planned, because the engine does not train them together.")
    if not isinstance(model, GPT) or model.head is None:
        raise ConfigurationError("tp and cp are planned for gpt-26b, gpt-100b and gpt-1t. Plan other models without.")
    heads = next(block.attention.heads for block in model.blocks if isinstance(block, Block))
    length = model.positions.num_embeddings
    require_parts(heads, length, tp=tp, cp=cp)
    if tp > 1:
        cut_weights(model, mesh["tp"])
        return replace(subject, around_step=loss_parallel)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention = _Gathering(block.attention, mesh["cp"].get_group())  # pyright: ignore

    def part(batch: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = subject.inputs(batch)
        here = slice(length // cp)
        return {"x": inputs["x"][:, here]}, targets[:, here]

    return replace(subject, inputs=part)


class _Gathering(nn.Module):
    def __init__(self, attention: Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.group = attention.qkv, attention.out, attention.heads, group

    def forward(self, x_BTD: Tensor, attend_BT: Tensor | None = None) -> Tensor:
        q_BHTK, *kv = self.qkv(x_BTD).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        keys, values = (all_gather_tensor_autograd(x.contiguous(), 2, self.group) for x in kv)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, keys, values)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


def require_parts(heads: int, length: int, *, tp: int, cp: int = 1) -> None:
    """Raise ConfigurationError unless the ranks divide heads and tokens."""
    for what, size, ranks in (("heads", heads, tp), ("tokens of a sample", length, tp * cp)):
        if size % ranks:
            raise ConfigurationError(f"{size} {what} do not divide by {ranks} ranks. Choose another tp, cp or seq.")


def cut_weights(model: GPT, mesh: DeviceMesh) -> None:
    """Apply the parallelism of Korthikanti et al. 2022, arXiv:2205.05198; a stage lacks some `ends`."""
    whole, sequence = Replicate(), Shard(1)
    ends: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "positions": RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    # Shapes are right, although qkv is cut across q, k and v.
    inner: dict[str, Any] = {
        "norm_1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(sequence, None), desired_input_layouts=(whole, None)),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=sequence),
        "norm_2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=sequence),
    }
    here = {name: style for name, style in ends.items() if name in model._modules}
    if here:
        parallelize_module(model, mesh, here, src_data_rank=None)
    for block in model.blocks:
        parallelize_module(block, mesh, inner, src_data_rank=None)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value within the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def grids_unasked() -> AbstractContextManager[None]:
    """Return a block that takes the ranks for a grid, which silent ranks cannot confirm."""

    def believe(data: Communicator, parts: ModelParts, everyone: Communicator) -> tuple[tuple[int, ...], list[int]]:
        return grid.sizes_of(data, parts), list(range(everyone.world_size))

    return replaced(grid, "places_of", believe)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Hide from modes what FSDP and DTensor compute."""
    join, infer = DeviceMesh._concatenate, ShardingPropagator._propagate_tensor_meta_non_cached
    with (
        replaced(DeviceMesh, "_concatenate", staticmethod(_without_modes(join))),
        replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _without_modes(infer)),
    ):
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call
