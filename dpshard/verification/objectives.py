"""Objectives: the scalars that verification differentiates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import ConfigurationError, VerificationError


@dataclass(frozen=True, slots=True)
class Loss:
    """A user's loss."""

    loss_fn: Callable[..., Tensor]
    targets: tuple[Tensor, ...]
    """Targets, with samples in dimension 0; with `rows_per_unit` > 1, their rows in dimension 1."""
    rows_per_unit: int = 1

    def of(self, output: Any, samples: Sequence[int]) -> Tensor:
        """Return the loss of `samples`, given their output."""
        index = torch.tensor(list(samples), device="cpu")
        picked = [t.index_select(0, index.to(t.device)) for t in self.targets]
        return self.loss_fn(output, *(picked if self.rows_per_unit == 1 else [t.flatten(0, 1) for t in picked]))


def require_targets(targets: Sequence[Any], rows: int) -> None:
    """Raise ConfigurationError unless each of `targets` is a tensor of `rows` rows."""
    for number, target in enumerate(targets):
        if not isinstance(target, Tensor) or target.dim() == 0 or len(target) != rows:
            found = f"shape {list(target.shape)}" if isinstance(target, Tensor) else f"type {type(target).__name__}"
            raise ConfigurationError(
                f"targets[{number}] has {found}, but the inputs have {rows} rows. Pass a tensor with a row for each of "
                f"them, or a tuple of such tensors: engine.verify(x, loss_fn=F.cross_entropy, targets=y)."
            )


def warn_of_blind_rows(targets: Sequence[Tensor], samples: int) -> None:
    """Warn if a loss that mixes samples may look on these rows like one that does not."""
    alike = [y for y in targets if y.dim() == 1 and not y.is_floating_point() and bool((y == y[0]).all())]
    if samples == 1:
        cause = "One sample does not show whether a loss mixes samples. Pass several."
    elif alike:
        cause = (
            f"All rows have the target {alike[0][0]}, so class weights that mix samples do not show. Pass rows of "
            f"several classes."
        )
    else:
        return
    warnings.warn(f"engine.verify: {cause}", stacklevel=4)


NOTHING_TO_TRAIN = (
    "No output of the model depends on a trainable parameter in a differentiable way, so there is nothing to train. "
    "Check requires_grad, and that the model returns tensors (or tuples, lists, dicts of them)."
)
Objective = Callable[[Any, Sequence[int]], Tensor]
"""(output for some samples, their numbers) -> scalar."""


def objectives(together: Sequence[Any], alone: Sequence[Any], chosen: Sequence[int], *, mean: bool) -> list[Objective]:
    """Return the objectives, given the output leaves for the `chosen` samples, and for the first of them alone."""
    leaves = [i for i, x in enumerate(together) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise VerificationError(NOTHING_TO_TRAIN)
    found: list[Objective] = [
        lambda output, _samples, i=i: pytree.tree_leaves(output)[i] for i in leaves if together[i].dim() == 0
    ]
    wide = [i for i in leaves if together[i].dim() > 0]
    if wide:
        seeds = _seeds([together[i] for i in wide], [alone[i] for i in wide], len(chosen))
        place = {sample: i for i, sample in enumerate(chosen)}

        def along(output: Any, samples: Sequence[int]) -> Tensor:
            outputs = pytree.tree_leaves(output)
            total = torch.zeros((), dtype=torch.float64, device=outputs[wide[0]].device)
            for i, (seed, dim, rows) in zip(wide, seeds, strict=True):
                if dim is not None and list(samples) != list(chosen):
                    seed = torch.cat([seed.narrow(dim, place[sample] * rows, rows) for sample in samples], dim)
                total = total + (outputs[i] * seed).sum().real
            return total / len(samples) if mean else total

        found.append(along)
    return found


def sample_dim(together: Tensor, alone: Tensor, n: int) -> tuple[int, int] | None:
    """Return (dimension of the samples, rows of a sample), or None."""
    dims = [d for d in range(together.dim()) if together.dim() == alone.dim() and together.shape[d] != alone.shape[d]]
    if len(dims) != 1 or together.shape[dims[0]] != n * alone.shape[dims[0]]:
        return None
    return dims[0], alone.shape[dims[0]]


def _seeds(together: Sequence[Tensor], alone: Sequence[Tensor], n: int) -> list[tuple[Tensor, int | None, int]]:
    """Return, per output, a random gradient and its `sample_dim`."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for x, y in zip(together, alone, strict=True):
        place = sample_dim(x, y, n)
        if place is None and x.shape != y.shape:
            raise VerificationError(
                f"An output has shape {tuple(x.shape)} for {n} samples and {tuple(y.shape)} for one of them. It does "
                f"not treat samples one by one (squeeze() without a dimension drops that of one sample). Pass the "
                f"loss: engine.verify(*inputs, loss_fn=..., targets=...)."
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        seed = torch.randn(x.shape, generator=generator, dtype=dtype, device="cpu").to(x.device, x.dtype)
        found.append((seed, *(place or (None, 0))))
    return found


def without_graph(output: Any) -> list[Any]:
    """Return the leaves, detached, each with its requires_grad."""
    leaves = pytree.tree_leaves(output)
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
