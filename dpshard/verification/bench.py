"""The place where a model is tried out beside its training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import DpshardError, VerificationError
from dpshard.interception import AS_DRAWN, Draws, Interception, IsolatedForward, Run
from dpshard.verification.kept import tensors_kept
from dpshard.verification.objectives import Loss, without_graph
from dpshard.verification.tolerances import Precision


def is_compared(x: Any) -> bool:
    """Whether a leaf of an output is compared: flags and integers too, since a mask or a label decides a loss."""
    return isinstance(x, Tensor) and x.layout is torch.strided


class RunFailedError(VerificationError):
    """A run of some samples raised an error of its own."""


@dataclass(slots=True)
class Bench:
    """One call of a model, to be repeated on chosen and on changed samples from one and the same state."""

    interception: Interception
    state: IsolatedForward
    run: Run
    loss: Loss | None
    mean: bool
    """Whether losses average over their samples."""
    chosen: list[int]
    """The samples whose gradients are compared."""
    draws: Draws = AS_DRAWN
    precision: Precision = field(default_factory=Precision)
    kept: Sequence[str] = ()
    """Paths of what forward leaves of each sample beside its output."""

    @property
    def half(self) -> bool:
        """Whether anything so far was computed in half precision."""
        return self.precision.half

    def plain(self, samples: Sequence[int], *, run: Run | None = None, rewind: bool = True) -> Any:
        """The model's output for some samples alone; VerificationError if it has none.

        `rewind`: from the state at the beginning, rather than from that which the last run has left.
        """
        run = self.run if run is None else run
        if rewind:
            self.state.rewind(self.draws)
        else:
            self.state.rewind_generators(self.draws)
        try:
            with self.precision:
                return self.interception.run_plain(run, list(samples), self.draws)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, DpshardError):
                raise
            raise RunFailedError(
                f"{type(run.module).__name__} fails on {len(samples)} sample(s) of the micro-batch taken alone "
                f"({error}), so they have no gradient of their own. Does it normalise over them (BatchNorm), need a "
                f"fixed size, or get what belongs to samples in a tensor without a dimension for them (flat ids with "
                f"offsets: pass ids [B, T], and flatten them in forward)?"
            ) from error

    def values(
        self, samples: Sequence[int], *, run: Run | None = None, loss: Loss | None = None, rewind: bool = True
    ) -> list[Tensor]:
        """The numbers of the output for some samples, and of the user's loss, without a graph."""
        with torch.no_grad():
            output = self.plain(samples, run=run, rewind=rewind)
            found = [x.detach() for x in pytree.tree_leaves(output) if is_compared(x)]
            if self.kept:
                there = tensors_kept(self.interception.model, output, with_graph=False)
                found += [there[path].detach() if path in there else torch.zeros(0) for path in self.kept]
            found = [torch.view_as_real(x) if x.is_complex() else x for x in found]
            loss = loss or self.loss
            if loss is not None:
                found.append(loss.of(output, samples).detach())
        return found

    def values_if_it_runs(self, samples: Sequence[int], *, run: Run, loss: Loss | None = None) -> list[Tensor] | None:
        """See `values`; None if forward refuses these inputs, as it may where numbers were made up."""
        try:
            return self.state.guarded(functools.partial(self.values, samples, run=run, loss=loss))
        except RunFailedError:
            return None

    def leaves(self, samples: Sequence[int]) -> tuple[list[Any], dict[str, Tensor]]:
        """The leaves of the output for some samples, which say whether they had a gradient; and what else is kept."""
        output = self.plain(samples)
        kept = tensors_kept(self.interception.model, output, with_graph=True)
        return without_graph(output), {path: x.detach().clone() for path, x in kept.items()}
