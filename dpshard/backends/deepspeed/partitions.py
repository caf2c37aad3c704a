"""Where DeepSpeed keeps each parameter's fp32 master copy.

Stages 1 and 2 concatenate the parameters of a param group and cut the result into W equal partitions, anywhere. Stage 3
concatenates a rank's chunks of every parameter, of W equal ones, the last padded. The layout is private, so every
fragment is compared with its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpshard.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """This rank's part of a parameter's master copy."""

    master: Tensor
    """Flat partition [N] that the optimizer steps on."""
    offset: int
    start: int
    """Start in the flattened parameter."""
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ZeroLayout:
    """This rank's fragments."""

    fragments: Mapping[str, Fragment]
    masters: tuple[Tensor, ...]
    chunks: Mapping[str, int] | None
    """Stage 3: elements of each parameter per rank, with padding."""


def read_layout(zero: Any, names: Mapping[Tensor, str], rank: int) -> ZeroLayout:
    """Return the layout of the parameters with `names`; raise ConfigurationError unless their values confirm it."""
    try:
        stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        found = list(_stage_3(zero, rank) if stage_3 else _flattened(zero, rank))
    except (AttributeError, TypeError, IndexError) as error:
        raise ConfigurationError(
            f"dpshard does not support how this version of DeepSpeed lays out its partitions ({error}). Use a version "
            f"that docs/sharding-deepspeed.md names."
        ) from error
    fragments: dict[str, Fragment] = {}
    for parameter, fragment, elements in found:
        name = names.get(parameter)
        if name is None:
            raise ConfigurationError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not a trainable parameter "
                f"of the model, so its gradient would not be clipped. Give the optimizer only the model's parameters."
            )
        master = fragment.master.detach()[fragment.offset : fragment.offset + fragment.length]
        if not torch.equal(master.to(elements.device, elements.dtype), elements):
            raise ConfigurationError(
                f"{name}: DeepSpeed's fp32 partition does not hold the values of this parameter where dpshard expects "
                f"them, so dpshard cannot place its noise. Make the engine right after deepspeed.initialize(), or "
                f"load_checkpoint(). If you did, this version of DeepSpeed is not supported."
            )
        fragments[name] = fragment
    missing = [name for name in names.values() if name not in fragments]
    if missing:
        raise ConfigurationError(
            f"{missing[0]} is trainable, but DeepSpeed's optimizer does not hold it. Freeze it with "
            f"requires_grad_(False) before deepspeed.initialize(), or hand it to the optimizer."
        )
    masters = tuple({id(f.master): f.master for f in fragments.values()}.values())
    chunks = {names[p]: p.partition_numel() for p, _, _ in found} if stage_3 else None
    return ZeroLayout(fragments, masters, chunks)


_Found = tuple[Any, Fragment, Tensor]
"""Parameter, fragment, and the elements that it must equal."""


def _flattened(zero: Any, rank: int) -> Iterator[_Found]:
    """Locate fragments by address: `_hp_mapping` ignores the order of round_robin_gradients."""
    bf16 = hasattr(zero, "bf16_groups")  # BF16_Optimizer: stage 1, bf16 parameters, fp32 accumulation
    groups = zero.bf16_groups if bf16 else zero.bit16_groups
    flats = zero.bf16_groups_flat if bf16 else zero.bit16_groups_flat
    masters = zero.fp32_groups_flat_partition if bf16 else zero.single_partition_of_fp32_groups
    for group, flat, master in zip(groups, flats, masters, strict=True):
        begin, end = rank * master.numel(), (rank + 1) * master.numel()
        for parameter in group:
            place = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size() if parameter.numel() else begin
            if not 0 <= place <= flat.numel() - parameter.numel():
                raise TypeError("a parameter lies outside of the flat tensor of its group")
            start = min(max(begin - place, 0), parameter.numel())
            length = max(min(end - place, parameter.numel()) - start, 0)
            fragment = Fragment(master, max(place - begin, 0) if length else 0, start, length)
            yield parameter, fragment, parameter.detach().reshape(-1)[start : start + length]


def _stage_3(zero: Any, rank: int) -> Iterator[_Found]:
    for group, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in group:
            chunk = parameter.partition_numel()
            start = min(rank * chunk, parameter.ds_numel)
            length = min(chunk, parameter.ds_numel - start)
            yield parameter, Fragment(master, offset, start, length), parameter.ds_tensor.detach()[:length]
            offset += chunk
