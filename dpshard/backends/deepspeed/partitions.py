"""Where DeepSpeed keeps the master copy of each parameter: which elements, on which rank, in which flat tensor.

A ZeRO optimizer steps on flat fp32 partitions ("masters"), not on the parameters of the model. Stages 1 and 2 lay the
parameters of a param group one after the other and cut the row into W equal partitions, wherever that falls. Stage 3
cuts every parameter into W equal chunks (the last ones padded), and lays the chunks of a rank side by side.

DeepSpeed has no public map of this, so it is read from what it holds, and then proved: every fragment of a master must
have the values of the very elements of the parameter that it is said to be the copy of.
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
    """The elements of one parameter whose master copy this rank holds."""

    master: Tensor
    """Flat partition [N], float32 (or lower precision, if DeepSpeed is told so), which the optimizer steps on."""
    offset: int
    """Where the fragment begins in the master."""
    start: int
    """Where it begins in the flattened parameter."""
    length: int
    """Number of its elements; 0 if other ranks hold the whole parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroLayout:
    """The fragments of this rank, one for every parameter."""

    fragments: Mapping[str, Fragment]
    masters: tuple[Tensor, ...]
    chunks: Mapping[str, int] | None
    """Stage 3: elements of each parameter that every rank holds, padding included."""


def read_layout(zero: Any, names: Mapping[Tensor, str], rank: int) -> ZeroLayout:
    """Return the layout of a ZeRO optimizer over the parameters with `names`; ConfigurationError if it is not proved.

    `zero` is DeepSpeed's wrapper around the optimizer.
    """
    try:
        stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        found = list(_stage_3(zero, rank) if stage_3 else _flattened(zero, rank))
    except (AttributeError, TypeError, IndexError) as error:
        raise ConfigurationError(
            f"This version of DeepSpeed lays its partitions out in a way that dpshard does not know ({error}). Use "
            f"one of the versions that docs/sharding-deepspeed.md names."
        ) from error
    fragments: dict[str, Fragment] = {}
    for parameter, fragment, elements in found:
        name = names.get(parameter)
        if name is None:
            raise ConfigurationError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not a trainable parameter "
                f"of the model: nobody would clip its gradient. Hand the optimizer the model's parameters alone."
            )
        master = fragment.master.detach()[fragment.offset : fragment.offset + fragment.length]
        if not torch.equal(master.to(elements.device, elements.dtype), elements):
            raise ConfigurationError(
                f"{name}: the fp32 partition that DeepSpeed steps on does not hold the values of the parameter where "
                f"dpshard looks for them, so its noise could not be put in the right place. Make the engine right "
                f"after deepspeed.initialize(), or load_checkpoint(); else this version of DeepSpeed is not supported."
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
"""A parameter, the fragment of this rank, and the elements of the parameter that it must hold."""


def _flattened(zero: Any, rank: int) -> Iterator[_Found]:
    """Stages 1 and 2: parameters are views of one flat tensor a group, so their place in memory is their place there.

    (DeepSpeed's own map, `_hp_mapping`, does not know that round_robin_gradients changes the order.)
    """
    bf16 = hasattr(zero, "bf16_groups")  # DeepSpeed's BF16_Optimizer: stage 1, bf16 parameters, fp32 accumulation
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
