"""How records of tensors derived only from trainable parameters go back to their roots.

The Jacobian does not depend on the samples. A function that only rearranges or selects elements preserves norms, so
only the clipped sum is pulled back. Otherwise each per-sample gradient is pulled back, by a vector-Jacobian product.
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
"""Functions that move or select elements, each at most once. A cast from real to complex numbers is not isometric."""

ISOMETRIC_PROPERTIES = frozenset({"T", "mT", "H", "mH"})


def transposes(name: str, args: Sequence[Any], shape: Sequence[int]) -> bool:
    """Return True if function `name` transposes a matrix."""
    if len(shape) != 2:
        return False
    swaps = name in ("transpose", "swapaxes", "swapdims") and len(args) == 3 and (args[1] - args[2]) % 2 == 1
    return swaps or name in ("t", "T", "mT")


def pull_back(source: Source, gradient: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the roots, given that of the derived tensor; complex ones as real and imaginary parts."""
    vjp, gradient = _with_vjp(source, gradient, values)
    (roots,) = vjp(gradient)
    return {name: as_real(root) for name, root in roots.items()}


def pull_back_per_sample(source: Source, record: Record, values: Mapping[str, Tensor]) -> dict[str, PerSampleGrad]:
    """Return records of the roots, given a record of the derived tensor."""
    vjp, gradient = _with_vjp(source, record.per_sample(), values)
    with warnings.catch_warnings():
        # vmap runs some functions (weight_norm) sample by sample.
        warnings.filterwarnings("ignore", "There is a performance drop")
        (roots,) = torch.func.vmap(vjp)(gradient)
    return {name: PerSampleGrad(as_real(root)) for name, root in roots.items()}


def _with_vjp(source: Source, gradient: Tensor, values: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
    leaves = {name: wide(values[name].detach()) for name in source.roots}
    output, vjp = torch.func.vjp(source.recompute, leaves)[:2]
    return vjp, as_complex(gradient, output.dtype).to(output.dtype)
