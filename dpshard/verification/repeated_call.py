"""One call of a model, to repeat on other samples from one state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import DpshardError, VerificationError
from dpshard.interception import AS_DRAWN, Draws, IsolatedForward, PackedRun, Replay, Run, is_placed
from dpshard.verification.kept import tensors_kept
from dpshard.verification.objectives import Loss, without_graph
from dpshard.verification.tolerances import Precision
from dpshard.verification.verdict import Verdict


def is_compared(x: Any) -> bool:
    """Return True for leaves to compare. Masks are compared, because they may decide a loss."""
    return isinstance(x, Tensor) and x.layout is torch.strided


def compared(output: Any) -> list[Tensor]:
    """Return the leaves to compare, without a graph."""
    return [in_parts(x) for x in pytree.tree_leaves(output) if is_compared(x)]


def in_parts(x: Tensor) -> Tensor:
    """Return a tensor without a graph; real and imaginary parts of complex numbers become pairs."""
    x = x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def gathered(output: Any) -> Any:
    """Gather DTensors, with their graph."""
    if not any(map(is_placed, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map(lambda x: x.full_tensor() if is_placed(x) else x, output)


class RunFailedError(VerificationError):
    """Raised if the model fails on some samples."""


@dataclass(slots=True)
class RepeatedCall:
    """A call and the state from which it is repeated."""

    replay: Replay
    state: IsolatedForward
    run: Run
    loss: Loss | None
    mean: bool
    """True if losses average over their samples."""
    chosen: list[int]
    """Samples to compare."""
    draws: Draws = AS_DRAWN
    precision: Precision = field(default_factory=Precision)
    verdict: Verdict = field(default_factory=Verdict)
    kept: Sequence[str] = ()
    """Paths of kept tensors; see [Note: Kept tensors]."""
    backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns the context of each backward."""

    @property
    def half(self) -> bool:
        """True if any function so far returned half precision."""
        return self.precision.half

    def plain(self, samples: Sequence[int], *, run: Run | None = None, rewind: bool = True) -> Any:
        """Return the output for only these samples; raises RunFailedError."""
        run = self.run if run is None else run
        if rewind:
            self.state.rewind(self.draws)
        else:
            self.state.rewind_generators(self.draws)
        try:
            with self.verdict.forward(), self.precision:
                return gathered(self.state.run_plain(run, list(samples), self.draws))
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, DpshardError):
                raise
            if isinstance(run, PackedRun):
                raise RunFailedError(
                    f"{type(run.module).__name__} fails on one unit of its packed rows alone, [1, L] in place of "
                    f"{list(run.packed.shape)} ({error}). Likely causes: a table or mask of a fixed length, or an "
                    f"input of the whole stream. Compute them in forward from position_ids or unit ids [R, T]."
                ) from error
            raise RunFailedError(
                f"{type(run.module).__name__} fails on only {len(samples)} sample(s) of the micro-batch ({error}), so "
                f"no per-sample gradient exists. Likely causes: it normalises over samples (BatchNorm), or needs a "
                f"fixed size. Or it gets values of samples in a tensor without a batch dimension. Instead of flat ids "
                f"with offsets, pass ids [B, T], and flatten them in forward."
            ) from error

    def values(
        self, samples: Sequence[int], *, run: Run | None = None, loss: Loss | None = None, rewind: bool = True
    ) -> list[Tensor]:
        """Return the output and the user's loss, without a graph."""
        with torch.no_grad():
            output = self.plain(samples, run=run, rewind=rewind)
            found = compared(output)
            if self.kept:
                there = tensors_kept(self.replay.parameters.model, output, with_graph=False)
                found += [in_parts(there[path]) if path in there else torch.zeros(0) for path in self.kept]
            loss = loss or self.loss
            if loss is not None:
                found.append(loss.of(output, samples).detach())
        return found

    def values_if_it_runs(self, samples: Sequence[int], *, run: Run, loss: Loss | None = None) -> list[Tensor] | None:
        """Return `values`, or None if the model fails on these inputs, which verification made up."""
        try:
            return self.state.guarded(functools.partial(self.values, samples, run=run, loss=loss))
        except RunFailedError:
            return None

    def leaves(self, samples: Sequence[int]) -> tuple[list[Any], dict[str, Tensor]]:
        """Return the output's leaves, and the other kept tensors."""
        output = self.plain(samples)
        kept = tensors_kept(self.replay.parameters.model, output, with_graph=True)
        return without_graph(output), {path: x.detach().clone() for path, x in kept.items()}
