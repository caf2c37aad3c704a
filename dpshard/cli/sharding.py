"""The model as --shard says: whole, replicated, or in shards."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpshard.errors import ConfigurationError


def shard(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """`model`, which is the same on all ranks, wrapped for training on all of them.

    Raises ConfigurationError if the number of ranks does not suit `how`.
    """
    if how == "none":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    world = dist.get_world_size()
    if how == "fsdp2":
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.type, _replicas(world), mesh_dim_names=("replicate", "shard"))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):  # the blocks of a transformer
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _replicas(world: int) -> tuple[int, int]:
    """Replicas, and shards of each: a replica a machine, or two on one machine."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    replicas = world // local if world > local else 2
    if world % replicas:
        raise ConfigurationError(f"shard='hsdp' divides the ranks into {replicas} replicas, but there are {world}.")
    return replicas, world // replicas
