"""What forward leaves with its graph, in attributes and in objects that it returns, for the loop to add to the loss.

[Note: Kept tensors]
A load-balancing loss is often kept (`self.l_aux`), and added in the loop. A tensor with a graph whose shape does not
follow the number of samples, and whose numbers do, is a statistic of them. It must be a loss of single samples, as one
that is returned. Where it has rows for samples, it is held against other company as outputs are.
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
    """By path, the tensors that the last forward has left beside those that it returns."""
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
    """Paths of what has rows for samples, given what is kept of n samples and of one."""
    return [path for path, x in together.items() if path in alone and sample_dim(x, alone[path], n) is not None]


def statistics_kept(together: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> list[str]:
    """Paths of what has no rows for samples, and depends on them."""
    return [
        path
        for path, x in together.items()
        if path in alone and x.shape == alone[path].shape and not same(x.detach(), alone[path].detach())
    ]


def objective_of(model: nn.Module, path: str, like: Tensor) -> Objective:
    """What to differentiate of a kept statistic."""
    generator = torch.Generator().manual_seed(0)
    seed = torch.randn(like.shape, generator=generator).to(like.device, like.dtype) if like.dim() else 1.0

    def objective(output: Any, _: Sequence[int]) -> Tensor:
        x = tensors_kept(model, output, with_graph=True).get(path)
        if x is None:
            raise VerificationError(f"{path}: forward leaves a tensor here for some samples, and none for others.")
        return (x * seed).sum()

    return objective


def named(path: str, error: VerificationError) -> VerificationError:
    """The error for a kept statistic that is no loss of single samples."""
    return VerificationError(
        f"{path}: forward leaves here, with its graph, what depends on several samples, and the loop may add it to the "
        f"loss. Keep detach() of it if it is for a log; leave it out if it is a loss that balances or compares "
        f"samples. {error}"
    )
