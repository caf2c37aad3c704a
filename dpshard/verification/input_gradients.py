"""Gradients of a pipeline stage's inputs: row i must depend on sample i only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import VerificationError
from dpshard.interception import Run

Gradients = list[Tensor | None]


class InputGradients:
    """Collects the gradients of inputs that require one."""

    def __init__(self, run: Run) -> None:
        self._places = [
            i for i, (x, dim) in enumerate(zip(run.given, run.dims, strict=True)) if dim is not None and x.requires_grad
        ]
        self._dims = run.dims
        self.inputs: list[Tensor] = []
        """The inputs of the latest forward."""
        self._gradients: Gradients = []

    def watched(self, run: Run) -> Run:
        """Return the run with inputs that require gradients."""
        return replace(run, original=self._watching(run.original)) if self._places else run

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            self.inputs, self._gradients = [], [None] * len(leaves)
            with torch._C.DisableTorchFunction(), torch.enable_grad():  # modes see the inputs as they were
                for i in self._places:
                    self.inputs.append(leaves[i].detach().requires_grad_())
                    self.inputs[-1].register_hook(lambda gradient, i=i: self._note(i, gradient))
                    leaves[i] = self.inputs[-1].clone()  # forward may write to it
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            return original(*args, **kwargs)

        return call

    def _note(self, i: int, gradient: Tensor) -> None:
        self._gradients[i] = gradient

    def take(self) -> Gradients:
        """Return the latest gradients."""
        self.inputs = []
        return self._gradients

    def verify(
        self,
        together: Gradients,
        singles: Sequence[Gradients],
        weight: float,
        tolerance: float,
        watched: Sequence[bool],
    ) -> None:
        """Raise VerificationError unless gradients together, times `weight`, are those of `watched` samples alone."""
        for i in self._places:
            dim = self._dims[i] or 0
            rows = [_rows_in_double(single[i], dim) for single in singles]
            size = max((float(row.norm()) for row in rows if row is not None), default=0.0)
            whole = _rows_in_double(together[i], dim)
            for k, row in enumerate(rows):
                each = 0 if row is None else len(row)
                own = None if whole is None else whole.narrow(0, k * len(whole) // len(rows), len(whole) // len(rows))
                zero = own if row is None else row
                if zero is None or not watched[k]:
                    continue
                own = torch.zeros_like(zero) if own is None else own * weight
                row = torch.zeros_like(zero) if row is None else row
                if (each not in (0, len(own))) or float((own - row).norm()) > tolerance * size:
                    raise VerificationError(
                        f"The gradient that this stage of the pipeline gives to the stage before it depends on other "
                        f"samples. Of sample {k}, its norm is {float(own.norm()):.4g} together with others and "
                        f"{float(row.norm()):.4g} alone. Likely causes: a function mixes samples, in forward or "
                        f"only in backward (a custom autograd.Function, a hook that scales gradients by those of the "
                        f"batch). Or the reduction of the loss is not the loss_reduction given to the engine."
                    )


def _rows_in_double(x: Tensor | None, dim: int) -> Tensor | None:
    return None if x is None else x.detach().double().movedim(dim, 0)
