"""Tensors that forward stores with their graph, so that the loop can add them to the loss.

[Note: Kept tensors]
Models often keep a load-balancing loss (`self.l_aux`). A tensor may depend on the samples while its shape does not
depend on their number. It must then be a sum or mean of per-sample losses. A tensor with a row per sample is compared
like an output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.errors import VerificationError
from dpshard.interception import same, walk, walk_through
from dpshard.verification.objectives import Objective, sample_dim


def tensors_kept(model: nn.Module, output: Any, *, with_graph: bool) -> dict[str, Tensor]:
    """Return, by path, the tensors in attributes and returned objects."""
    leaves = pytree.tree_leaves(output)
    returned = {id(x) for x in leaves if isinstance(x, Tensor)}
    with torch._C.DisableTorchFunction():
        found = dict(walk(model))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                found |= walk_through(f"output[{i}]", leaf)
    return {
        path: x
        for path, x in found.items()
        if isinstance(x, Tensor) and id(x) not in returned and (x.grad_fn is not None or not with_graph)
    }


def rows_kept(together: Mapping[str, Tensor], alone: Mapping[str, Tensor], n: int) -> list[str]:
    """Return the paths of the tensors with a row per sample."""
    return [path for path, x in together.items() if path in alone and sample_dim(x, alone[path], n) is not None]


def statistics_kept(together: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> list[str]:
    """Return the paths of the tensors without such rows that depend on the samples."""
    return [
        path
        for path, x in together.items()
        if path in alone and x.shape == alone[path].shape and not same(x.detach(), alone[path].detach())
    ]


def objective_of(model: nn.Module, path: str, like: Tensor) -> Objective:
    """Return the objective that differentiates a kept statistic."""
    generator = torch.Generator().manual_seed(0)
    seed = torch.randn(like.shape, generator=generator, device="cpu").to(like) if like.dim() else 1.0

    def objective(output: Any, _: Sequence[int]) -> Tensor:
        x = tensors_kept(model, output, with_graph=True).get(path)
        if x is None:
            raise VerificationError(f"{path}: forward leaves a tensor here for some samples, and none for others.")
        return (x * seed).sum()

    return objective


def statistic_error(path: str, error: VerificationError) -> VerificationError:
    """Return the error for a kept statistic that is no sum or mean of per-sample losses."""
    return VerificationError(
        f"{path}: forward leaves a tensor with its graph here that depends on several samples, and the loop may add "
        f"it to the loss. To log it, keep detach() of it; drop a loss that balances or compares samples. {error}"
    )
