"""The autograd nodes that bring records to the tape, and clipped sums to the parameters, in one backward pass.

[Note: Anchor, slot, tap]
Three nodes implement every clipping style; rules do not use them:

    parameters --> Anchor --token--> Tap --> rest of the forward
                  (1 a group)       (on the output of the function that used the parameter)

    parameters --> Anchor --token--> Slot --dummies--> Tap --> rest of a compiled region
                                    (1 a region)

Tap    passes the output gradient on, and hands it and the tensors kept in forward to the tape, as records. A product
       that calls repeat can be one node with its tap.
Anchor has an edge to every tap of its group, so autograd runs it after them. It returns the clipped sums as gradients.
       Rules see detached parameters, so only anchors give parameters gradients.
Tokens have gradients on GPUs. Only where a gradient flows does autograd make the stream of an anchor wait for those of
       its taps. Without one, some versions of torch run the anchor in another thread.
Slot   carries records out of a compiled region, which cannot reach the tape: the region takes dummies as inputs, and
       the tap returns the records as their gradients. Gradients of per-sample copies of a parameter also arrive there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _autograd

from dpshard.clipping.checkpointing import operators_are_watched
from dpshard.errors import UnsupportedParameterError
from dpshard.records.precision import exact_products


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block for norms and sums: no autocast, IEEE products ([Note: Why not TF32] in precision.py)."""
    products = exact_products(device)
    # A query is cheaper than two contexts per layer.
    return _without_autocast(device, products) if torch.is_autocast_enabled(device.type) else products


@contextmanager
def _without_autocast(device: torch.device, inner: AbstractContextManager[Any]) -> Iterator[None]:
    # The user may call loss.backward() inside autocast.
    with torch.autocast(device.type, enabled=False), inner:
        yield


def _reached(edges: Sequence[tuple[Any, int]]) -> list[bool] | None:
    """Return to which leaves among `edges` the running pass brings a gradient: all, except in backward(inputs=...).

    None if it returns the gradient of one: torch.autograd.grad.
    """
    reaches = torch._C._will_engine_execute_node
    try:
        return [node is not None and reaches(node) for node, _ in edges]
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return None


def _wants(node: Any) -> bool:
    """Return True if the running pass needs a node's gradient; the first of two passes may not."""
    reached = _reached([(node, 0)])
    return reached is None or reached[0]


Node = TypeVar("Node", bound=torch.autograd.Function)


def left_out_of_graphs(node: type[Node]) -> type[Node]:
    """Keep a node out of compiled functions, also of those that call loss.backward() themselves."""
    setattr(node.backward, "_torchdynamo_disable", True)  # noqa: B010 - as torch.compiler.disable, without its wrapper
    try:
        frames: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009
        skip = frames._FrameAction.SKIP  # for its code, and for what it calls
        frames.set_code_exec_strategy(node.backward.__code__, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch has other private names
        setattr(node, "backward", staticmethod(torch.compiler.disable(node.backward)))  # noqa: B010
    return node


@left_out_of_graphs
class Anchor(torch.autograd.Function):
    """Parameters -> token [0]; backward: `close` returns the clipped sums.

    `close` gets those that the pass reaches; None if torch.autograd.grad would return one instead of `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, close: Callable[[list[bool] | None], Sequence[Tensor | None]], *parameters: Tensor) -> Tensor:
        """Make the token."""
        ctx.close = close
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Close the anchor, because every slot of these parameters has its gradients."""
        return (None, *ctx.close(_reached(ctx.next_functions)))


@left_out_of_graphs
class Slot(torch.autograd.Function):
    """`count` templates and the tokens -> one tensor per template; backward: `arrive()` gets their gradients."""

    @staticmethod
    def forward(
        ctx: Any, arrive: Callable[[Sequence[Tensor | None]], None], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Make the dummies."""
        ctx.arrive, ctx.count, ctx.tokens = arrive, count, len(tensors) - count
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunction():  # function modes need not see each of several hundred
            return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Pass the gradients of the dummies to `arrive`."""
        device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
        with in_full_precision(device):
            ctx.arrive(gradients)
        return (*(None,) * (2 + ctx.count), *(_blank(device),) * ctx.tokens)


def _blank(device: torch.device) -> Tensor | None:
    """Return the gradient of a token; see [Note: Anchor, slot, tap]."""
    return torch.empty(0, device=device) if device.type == "cuda" else None


@left_out_of_graphs
class _Hold(torch.autograd.Function):
    """x -> x, saved for a later tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def hold(x: Tensor) -> Tensor:
    """Return `x`, saved now for the tap of the function that receives it.

    Activation checkpointing repeats a segment up to its last saved tensor. If the tap saved `x` after its function,
    this would repeat the last matrix product of the segment.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return x
    # Under autocast the function casts `x`. Without hooks on saved tensors nothing is repeated.
    waited_for = _autograd._top_saved_tensors_default_hooks(False) is not None
    return _Hold.apply(x) if waited_for and not torch.is_autocast_enabled(x.device.type) else x


def _node_of(x: Tensor) -> Any:
    """Return the node that holds `x`; None in a compiled region."""
    if torch.compiler.is_compiling():
        return None
    return x.grad_fn if isinstance(x.grad_fn, _Hold._backward_cls) else None


Arrive = Callable[[Sequence[Tensor | None]], None]
"""Takes the tensors kept for a use, and the output gradient."""


def _hand_over(ctx: Any, ends: Sequence[tuple[Any, int]], kept: Sequence[Tensor], g: Tensor) -> None:
    """Call `ctx.arrive`, unless the pass is autograd.grad(loss, input), which needs no gradient of a parameter."""
    for node, _ in ends:
        if node is not None and torch._C._will_engine_execute_node(node):
            with in_full_precision(g.device):
                ctx.arrive((*kept, g))
            return


@left_out_of_graphs
class _Tap(torch.autograd.Function):
    """Return `output`; in backward, pass its gradient on, and hand it and the kept tensors to `arrive`.

    The first `count` tensors are saved; the tap has edges to the others.
    """

    @staticmethod
    def forward(
        ctx: Any, arrive: Arrive, nodes: tuple[Any, ...], count: int, output: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.arrive, ctx.tokens = arrive, len(tensors) - count
        return _tapped(ctx, nodes, count, output, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedParameterError(_CREATE_GRAPH)
        _hand_over(ctx, ctx.next_functions[1 + ctx.count :], _kept(ctx), gradients[0])
        return (None, None, None, *gradients, *(None,) * ctx.count, *(_blank(gradients[0].device),) * ctx.tokens)


# Function.apply in Python serves transforms of torch.func, which the mode leaves before a tap.
_apply_tap: Any = getattr(super(torch.autograd.Function, _Tap), "apply")  # noqa: B009


@left_out_of_graphs
class _FusedTap(torch.autograd.Function):
    """Compute a function with its tap: `run` gets the input, and operands that autograd does not see."""

    @staticmethod
    def forward(ctx: Any, arrive: Arrive, run: Any, gradient: Any, operands: Any, input: Tensor, *_: Tensor) -> Tensor:
        ctx.arrive, ctx.gradient = arrive, gradient
        output, kept = run(_itself, input, *operands)
        ctx.save_for_backward(operands[0].detach(), *kept)  # a parameter may get other data before backward
        return output.data  # perhaps a view, of which a tap would make autograd copy gradients of the whole base

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedParameterError(_CREATE_GRAPH)
        (g,), (weight, *kept), ((into, _), *ends) = gradients, ctx.saved_tensors, ctx.next_functions
        _hand_over(ctx, ends, kept, g)
        gradient = ctx.gradient(g, weight) if _wants(into) else None
        return (None, None, None, None, gradient, *(_blank(g.device),) * len(ends))


def _itself(x: Tensor) -> Tensor:
    return x


_apply_fused_tap: Any = getattr(super(torch.autograd.Function, _FusedTap), "apply")  # noqa: B009


class _RegionTap(torch.autograd.Function):
    """A tap in a compiled region: the last tensors are dummies; their gradients are the kept tensors and g."""

    @staticmethod
    def forward(ctx: Any, nodes: tuple[Any, ...], count: int, output: Tensor, *tensors: Tensor) -> Tensor:
        return _tapped(ctx, nodes, count, output, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedParameterError(_CREATE_GRAPH)
        kept = [x.to(_dummy_dtype(x)) for x in _kept(ctx)]
        return (None, None, *gradients, *(None,) * ctx.count, *kept, *gradients)


_CREATE_GRAPH = (
    "backward was called with create_graph=True: the gradient of a gradient reaches parameters along paths that "
    "dpshard does not see (gradient penalties, meta-learning). Compute it without create_graph."
)


def _tapped(ctx: Any, nodes: tuple[Any, ...], count: int, output: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    ctx.nodes, ctx.count = nodes, count
    ctx.save_for_backward(*tensors[:count])
    if torch.compiler.is_compiling():
        return output.clone()  # the compiler removes the copy, and refuses mark_dirty
    if operators_are_watched():
        return output.detach()  # selective checkpointing takes mark_dirty for a write to a kept output
    if type(output) is not Tensor and hasattr(output, "device_mesh"):
        return output.detach()  # a DTensor
    ctx.mark_dirty(output)
    return output


def _kept(ctx: Any) -> list[Tensor]:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if node is None else node.saved_tensors[0] for node in ctx.nodes]


def tap(output: Tensor, keep: tuple[Tensor, ...], ends: Sequence[Tensor], arrive: Arrive | None) -> Tensor:
    """Return `output`, tapped: in backward, `arrive` gets `keep` and the output gradient.

    The tap has edges to `ends`: tokens of the anchors. In a compiled region (`arrive` is None) they are the dummies of
    a slot, which carry the kept tensors out.
    """
    nodes = tuple([_node_of(x) for x in keep])
    own = [x.detach() for x, node in zip(keep, nodes, strict=True) if node is None]
    if arrive is None:
        return _RegionTap.apply(nodes, len(own), output, *own, *ends)
    return _apply_tap(arrive, nodes, len(own), output, *own, *ends)


def fuses() -> bool:
    """Return True if a function and its tap may be one node. Autocast casts, hooks on saved tensors wait for `hold`."""
    return _autograd._top_saved_tensors_default_hooks(False) is None and not torch._C._is_any_autocast_enabled()


def fused_tap(
    run: Any,
    gradient: Callable[[Tensor, Tensor], Tensor],
    input: Tensor,
    operands: tuple[Tensor | None, ...],
    ends: Sequence[Tensor],
    arrive: Arrive,
) -> Tensor:
    """Return the output of a planned function, tapped; see `tap`. `operands`: weight and bias, both parameters."""
    return _apply_fused_tap(arrive, run, gradient, operands, input, *ends)


def dummies_like(output: Tensor, keep: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return stride-0 templates (no memory) for `keep` and the gradient of `output`."""
    return tuple(torch.zeros((), dtype=_dummy_dtype(x), device=x.device).expand(x.shape) for x in (*keep, output))


def _dummy_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which `x` travels as a gradient; integers are exact in float64."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.float64
