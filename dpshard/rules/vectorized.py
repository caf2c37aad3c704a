"""Functions run sample by sample (vmap), with one copy of the parameter a sample.

Exact for differentiable functions that treat samples independently.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.rules.call import Call
from dpshard.rules.registry import rule
from dpshard.rules.torch_functions import functions_named


@rule(
    *functions_named("bmm baddbmm mv addmv prelu outer inner einsum tensordot cdist".split()),
    *(F.prelu, F.cosine_similarity, F.pairwise_distance),
)
def vectorized(call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Return the function's result under vmap; parameters enter as [B, *shape]."""
    if call.output_axis is None:
        raise call.refuse("its output carries no samples of the micro-batch")
    B, axis_out = call.batch_size, call.output_axis
    leaves, tree = pytree.tree_flatten((args, kwargs))
    batched: list[Tensor] = []
    places: list[int] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        axis = call.axis(leaf)
        if call.source(leaf) is not None:
            batched.append(call.per_sample(leaf))
        elif axis is not None:
            k = leaf.shape[axis.dim] // B
            # The function expects a dimension of a sample's rows, even with one row.
            rows_first = axis.split(leaf, B)
            batched.append(rows_first.unsqueeze(axis.dim + 1) if k == 1 else rows_first)
        else:
            continue
        places.append(place)

    def one_sample(*tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        sample_args, sample_kwargs = pytree.tree_unflatten(filled, tree)
        return call.func(*sample_args, **sample_kwargs)

    output = torch.func.vmap(one_sample, randomness="different")(*batched)
    k = output.shape[axis_out.dim + 1]
    return axis_out.merge(output.squeeze(axis_out.dim + 1) if k == 1 else output, k)
