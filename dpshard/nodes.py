"""The autograd nodes: how per-sample records reach the clipping factor within one backward pass.

[Note: Anchor, slot, tap]
Three autograd nodes make every clipping style, and the rules know none of them:

    parameters --> Anchor --token--> Slot --dummies--> Tap --> rest of the forward
                  (1 a group)       (1 a use)        (on the output of the function that used the parameter)

Tap    passes the output gradient g on, and returns what was kept in forward, and g, as the gradients of its dummies.
Slot   receives these as its incoming gradients and hands them to the tape, as records.
Anchor has an edge to every slot of its group, so that autograd runs it after all of them; it asks the tape for the
       clipped sums and returns them as the gradients of the parameters. Rules see detached parameters, so no gradient
       reaches a parameter but through its anchor.

Records travel as gradients because that survives torch.compile: a compiled region takes its dummies as inputs and
returns their gradients, while slots and anchors run outside of it, in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpshard.errors import UnsupportedParameterError


def without_autocast(device: torch.device) -> torch.autocast:
    """A block outside of autocast: a loss.backward() inside of it would take norms and sums in half precision."""
    return torch.autocast(device.type, enabled=False)


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward pass that runs now adds to `.grad`: torch.autograd.grad hands gradients to its caller."""
    with torch.enable_grad():
        alias = leaf.view_as(leaf).grad_fn
    node = alias.next_functions[0][0] if alias is not None else None
    assert node is not None
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return False
    return True


class Anchor(torch.autograd.Function):
    """Parameters -> token [0]; backward: what `close()` returns, their clipped sums, as their gradients."""

    @staticmethod
    def forward(ctx: Any, close: Callable[[], Sequence[Tensor | None]], *parameters: Tensor) -> Tensor:
        """Make the token."""
        ctx.close = close
        ctx.set_materialize_grads(False)
        return torch.zeros(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Close: every slot of these parameters has had its gradients."""
        return (None, *ctx.close())


class Slot(torch.autograd.Function):
    """`count` templates and the tokens -> one tensor per template; backward: `arrive()` is told their gradients."""

    @staticmethod
    def forward(
        ctx: Any, arrive: Callable[[Sequence[Tensor | None]], None], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Make the dummies."""
        ctx.arrive, ctx.inputs = arrive, len(tensors)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Hand the gradients of the dummies on."""
        device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
        with without_autocast(device):
            ctx.arrive(gradients)
        return (None,) * (2 + ctx.inputs)


class _Hold(torch.autograd.Function):
    """x -> x, saved for a tap that is yet to come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def hold(x: Tensor) -> Tensor:
    """`x`, saved here and now for the tap of the function that it is handed to.

    Activation checkpointing repeats a segment up to the last tensor that it saved. A tap comes after its function and
    would save there: the last matrix product of a segment would be repeated for a tensor that went into it.
    """
    recorded = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # What autocast makes of `x` is known when the function has run.
    return _Hold.apply(x) if recorded and not torch.is_autocast_enabled(x.device.type) else x


def _node_of(x: Tensor) -> Any:
    """The node that holds `x`, or None: within a compiled region nothing is held."""
    if torch.compiler.is_compiling():
        return None
    return x.grad_fn if isinstance(x.grad_fn, _Hold._backward_cls) else None


class _Tap(torch.autograd.Function):
    """`output` unchanged; backward: g passes on, and the kept tensors and g are the gradients of the dummies."""

    @staticmethod
    def forward(ctx: Any, nodes: tuple[Any, ...], count: int, output: Tensor, *tensors: Tensor) -> Tensor:
        kept = tensors[:count]
        ctx.nodes, ctx.count = nodes, count
        ctx.save_for_backward(*kept)
        if torch.compiler.is_compiling():
            return output.clone()  # the compiler removes the copy, and refuses mark_dirty
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedParameterError(
                "backward was called with create_graph=True: the gradient of a gradient reaches parameters on ways "
                "that dpshard does not see (gradient penalties, meta-learning). Compute it without create_graph."
            )
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if node is None else node.saved_tensors[0] for node in ctx.nodes]
        kept = [x if x.is_floating_point() else x.double() for x in kept]
        return (None, None, gradient, *(None,) * ctx.count, *kept, gradient)


def tap(output: Tensor, keep: tuple[Tensor, ...], dummies: tuple[Tensor, ...]) -> Tensor:
    """`output`, tapped: in backward, `keep` and the output gradient arrive as the gradients of `dummies`."""
    nodes = tuple(_node_of(x) for x in keep)
    own = [x.detach() for x, node in zip(keep, nodes, strict=True) if node is None]
    return _Tap.apply(nodes, len(own), output, *own, *dummies)


def dummies_like(output: Tensor, keep: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Stride-0 templates (no memory) for `keep` and the gradient of `output`."""
    return tuple(
        torch.zeros((), dtype=x.dtype if x.is_floating_point() else torch.float64, device=x.device).expand(x.shape)
        for x in (*keep, output)
    )
