"""Tensors derived from trainable parameters alone, and how the records of a derived tensor go back to its roots.

A derivation needs no rule: its Jacobian does not depend on the samples. What rearranges or selects elements is an
isometry, so the norm of the root's gradient is that of the derived tensor's, and only the clipped sum goes back
through the Jacobian. Any other derivation takes the per-sample gradients back, one vector-Jacobian product each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpshard.records import PerSampleGrad, Record, as_complex, as_real, wide
from dpshard.rules.call import Source
from dpshard.rules.torch_functions import functions_named

_ISOMETRIC_NAMES = (
    *("t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "adjoint"),
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"),
    *("contiguous", "clone", "float", "double", "half", "bfloat16", "to", "type_as", "type", "neg", "__neg__"),
    *("select", "narrow", "chunk", "split", "unbind", "__getitem__", "split_with_sizes", "tensor_split", "flip"),
    *("view_as_complex", "view_as_real"),
)
ISOMETRIC = functions_named(_ISOMETRIC_NAMES)
"""Functions that move or pick elements of one tensor, each at most once: the adjoint preserves norms.

Of a complex element both parts: a cast from real numbers does not.
"""

ISOMETRIC_PROPERTIES = frozenset({"T", "mT", "H", "mH"})


def transposes(name: str, args: Sequence[Any], shape: Sequence[int]) -> bool:
    """Whether the function `name`, given a tensor of `shape` and other arguments, is the transpose of a matrix."""
    if len(shape) != 2:
        return False
    swaps = name in ("transpose", "swapaxes", "swapdims") and len(args) == 3 and (args[1] - args[2]) % 2 == 1
    return swaps or name in ("t", "T", "mT")


def pull_back(source: Source, gradient: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the roots from the gradient of the derived tensor, both without a batch dimension.

    Of complex tensors here and below: of their parts, see `as_real`.
    """
    leaves = {name: wide(values[name].detach()) for name in source.roots}
    replayed, vjp = torch.func.vjp(source.replay, leaves)[:2]
    (roots,) = vjp(as_complex(gradient, replayed.dtype).to(replayed.dtype))
    return {name: as_real(root) for name, root in roots.items()}


def pull_back_per_sample(source: Source, record: Record, values: Mapping[str, Tensor]) -> dict[str, PerSampleGrad]:
    """Per-sample records of the roots from a record of the derived tensor: a vector-Jacobian product a sample."""
    leaves = {name: wide(values[name].detach()) for name in source.roots}
    replayed, vjp = torch.func.vjp(source.replay, leaves)[:2]
    gradient = as_complex(record.per_sample(), replayed.dtype).to(replayed.dtype)
    with warnings.catch_warnings():
        # What vmap cannot batch (weight_norm) it runs sample by sample, which is all that could be done here.
        warnings.filterwarnings("ignore", "There is a performance drop")
        (roots,) = torch.func.vmap(vjp)(gradient)
    return {name: PerSampleGrad(as_real(root)) for name, root in roots.items()}
