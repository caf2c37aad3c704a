"""Two backward passes through the model per backward of the loss: norms, then clipped sums.

[Note: Two passes] See docs/architecture.md. Both passes must compute the same gradients. So they draw the same random
numbers, and no hook may write to the gradients that start them. Goodfellow 2015, arXiv:1510.01799; Lee & Kifer 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.clipping.autograd_nodes import left_out_of_graphs
from dpshard.clipping.tape import Pass, Tape
from dpshard.errors import REENTRANT, LogicalBatchError, UnsupportedParameterError
from dpshard.records.written import changed_between_passes


@left_out_of_graphs
class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, inner: list[Tensor], trigger: Tensor) -> tuple[Tensor, ...]:
        ctx.tape, ctx.inner = tape, inner
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tape, inner = ctx.tape, ctx.inner
        if inner is None:
            raise LogicalBatchError("Backward reached this forward twice: call it once, on the sum of all losses.")
        reached = [(x, g) for x, g in zip(inner, gradients, strict=True) if g is not None]
        tensors, seeds = [x for x, _ in reached], [g for _, g in reached]
        tokens = tape.tokens()
        if reached and tokens:
            with torch.enable_grad():
                tape.current = Pass.NORMS
                written = [seed._version for seed in seeds]
                gpus = {seed.device.index for seed in seeds if seed.device.type == "cuda"}
                try:
                    with tape.kept_outputs.handed_out_again(), torch.random.fork_rng(devices=[*gpus]):
                        torch.autograd.grad(tensors, tokens, seeds, retain_graph=True, allow_unused=True)
                except RuntimeError as error:
                    if "use_reentrant" in str(error):
                        raise UnsupportedParameterError(REENTRANT) from error
                    raise
                with torch.no_grad():
                    tape.between_passes()
                unused = tape.unused_anchor_tokens()
                torch.autograd.backward([*tensors, *unused], [*seeds, *(torch.zeros_like(token) for token in unused)])
                if [seed._version for seed in seeds] != written:
                    tape.aborted = True  # the sums are delivered: refuse their release
                    raise changed_between_passes()
        ctx.inner = None
        return None, None, None


def through_two_passes(forward: Callable[[], Any], tape: Tape) -> Any:
    """Run `forward`, and cut its outputs from the graph; their backward runs both passes."""
    if tape.forwards.count > 1:
        raise LogicalBatchError(
            "The model was called twice for the samples of one micro-batch; with two backward passes each call would "
            'be clipped by itself. Choose a clipping_mode of one pass: "auto", "bk", "bk-mixed-ghost", "bk-mixed-opt".'
        )
    leaves, tree = pytree.tree_flatten(forward())
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        trigger = torch.zeros(0, requires_grad=True)
        cut = _Cut.apply(tape, [leaves[i] for i in places], trigger)
        for i, x in zip(places, cut, strict=True):
            leaves[i] = x
    return pytree.tree_unflatten(leaves, tree)
