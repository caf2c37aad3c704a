"""The autograd nodes that bring records to the tape, and clipped sums to the parameters, in one backward pass.

[Note: Anchor, slot, tap] docs/architecture.md draws them.

    parameters --> Anchor (1 or more groups)   --token--> Tap (on an output) --> rest of the forward
    parameters --> Anchor   --token--> Slot (1 a region) --dummies--> Tap --> rest of a compiled region

Rules compute with detached parameters, so parameters get gradients only from anchors. On a GPU tokens have empty
gradients. Without them, an anchor might run in another thread, or before the streams of its taps finish.
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
    """Return a context without autocast and with IEEE products ([Note: Why not TF32] in precision.py)."""
    products = exact_products(device)
    return _without_autocast(device, products) if torch.is_autocast_enabled(device.type) else products


@contextmanager
def _without_autocast(device: torch.device, inner: AbstractContextManager[Any]) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), inner:
        yield


def _reached(edges: Sequence[tuple[Any, int]]) -> list[bool] | None:
    """Return, for each edge, whether the pass computes its gradient; None in torch.autograd.grad of a leaf."""
    reaches = torch._C._will_engine_execute_node
    try:
        return [node is not None and reaches(node) for node, _ in edges]
    except RuntimeError:  # "A leaf node was passed ... but we are currently running autograd.grad()"
        return None


def _wants(node: Any) -> bool:
    reached = _reached([(node, 0)])
    return reached is None or reached[0]


Node = TypeVar("Node", bound=torch.autograd.Function)


def left_out_of_graphs(node: type[Node]) -> type[Node]:
    """Keep a node's backward out of compiled functions."""
    setattr(node, "backward", staticmethod(_outside_graphs(node.backward)))  # noqa: B010
    return node


def _outside_graphs(function: Any) -> Any:
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010 - as torch.compiler.disable, without its wrapper
    return function if runs_as_python(function) else torch.compiler.disable(function)


def runs_as_python(function: Any) -> bool:
    """Stop dynamo from compiling a function by itself; return True if this torch can."""
    try:
        frames: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch has other private names
        return False
    return True


def _applied(node: type[torch.autograd.Function]) -> Any:
    """Return the C++ `apply` of a node; the Python one costs a call per argument, and serves only torch.func."""
    return getattr(super(torch.autograd.Function, node), "apply")  # noqa: B009


@left_out_of_graphs
class Anchor(torch.autograd.Function):
    """Parameters -> token [0]. In backward, `close` returns the clipped sums.

    `close` gets, for each parameter, whether the pass computes its gradient; None in torch.autograd.grad.
    """

    @staticmethod
    def forward(ctx: Any, close: Callable[[list[bool] | None], Sequence[Tensor | None]], *parameters: Tensor) -> Tensor:
        """Return the token."""
        ctx.close = close
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        """Close the anchor, after all its taps."""
        return (None, *ctx.close(_reached(ctx.next_functions)))


apply_anchor = _applied(Anchor)


@left_out_of_graphs
class Slot(torch.autograd.Function):
    """`count` templates, then tokens -> a dummy per template. In backward, `arrive` gets the dummies' gradients."""

    @staticmethod
    def forward(
        ctx: Any, arrive: Callable[[Sequence[Tensor | None]], None], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the dummies."""
        ctx.arrive, ctx.count, ctx.tokens = arrive, count, len(tensors) - count
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunction():  # spares each function mode a call per template
            return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Pass the gradients to `arrive`."""
        device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
        with in_full_precision(device):
            ctx.arrive(gradients)
        return (*(None,) * (2 + ctx.count), *(_blank(device),) * ctx.tokens)


apply_slot = _applied(Slot)


def _blank(device: torch.device) -> Tensor | None:
    """Gradient of a token; see [Note: Anchor, slot, tap]."""
    return torch.empty(0, device=device) if device.type == "cuda" else None


@left_out_of_graphs
class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def hold(x: Tensor) -> Tensor:
    """Return `x`, saved now for the next function's tap.

    Activation checkpointing recomputes a segment up to its last saved tensor. If the tap saved `x` after the function,
    the function would be recomputed, too.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return x
    # Under autocast the function uses a cast of `x`. Without hooks on saved tensors nothing is recomputed.
    waited_for = _autograd._top_saved_tensors_default_hooks(False) is not None
    return _Hold.apply(x) if waited_for and not torch.is_autocast_enabled(x.device.type) else x


def _node_of(x: Tensor) -> Any:
    if torch.compiler.is_compiling():
        return None
    return x.grad_fn if isinstance(x.grad_fn, _Hold._backward_cls) else None


Arrive = Callable[[Sequence[Tensor | None]], None]
"""Takes kept tensors, and the output gradient."""


def _hand_over(ctx: Any, ends: Sequence[tuple[Any, int]], kept: Sequence[Tensor], g: Tensor) -> None:
    """Call `ctx.arrive`, unless the pass needs no gradient of a parameter."""
    for node, _ in ends:
        if node is not None and torch._C._will_engine_execute_node(node):
            with in_full_precision(g.device):
                ctx.arrive((*kept, g))
            return


@left_out_of_graphs
class _Tap(torch.autograd.Function):
    """Identity on `output`. `tensors`: `count` tensors to save, then tokens."""

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


_apply_tap = _applied(_Tap)


@_outside_graphs
def _tap_outside_graphs(*args: Any) -> Tensor:
    return _apply_tap(*args)  # dynamo of torch 2.11 warns of a builtin


@left_out_of_graphs
class _FusedTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrive: Arrive, run: Any, gradient: Any, operands: Any, input: Tensor, *_: Tensor) -> Tensor:
        ctx.arrive, ctx.gradient = arrive, gradient
        output, kept = run(_itself, input, *operands)
        ctx.save_for_backward(operands[0].detach(), *kept)  # the weight may get other data before backward
        return output.data  # a tap on a view would make autograd copy gradients of the base

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


_apply_fused_tap = _applied(_FusedTap)


class _RegionTap(torch.autograd.Function):
    """A tap in a compiled region. It returns the kept tensors and the output gradient as gradients of its dummies."""

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
    """Return `output`; in backward, `arrive` gets `keep` and the output gradient.

    `ends`: tokens, or dummies in a compiled region, where `arrive` is None.
    """
    nodes = tuple([_node_of(x) for x in keep])
    own = [x.detach() for x, node in zip(keep, nodes, strict=True) if node is None]
    if arrive is None:
        return _RegionTap.apply(nodes, len(own), output, *own, *ends)
    apply = _tap_outside_graphs if torch.compiler.is_compiling() else _apply_tap
    return apply(arrive, nodes, len(own), output, *own, *ends)


def fuses() -> bool:
    """Return True if a function and its tap may be one node: autocast and saved-tensor hooks are off."""
    return _autograd._top_saved_tensors_default_hooks(False) is None and not torch._C._is_any_autocast_enabled()


def fused_tap(
    run: Any,
    gradient: Callable[[Tensor, Tensor], Tensor],
    input: Tensor,
    operands: tuple[Tensor | None, ...],
    ends: Sequence[Tensor],
    arrive: Arrive,
) -> Tensor:
    """Run a planned function and its tap as one node; return the output. `operands`: weight and bias."""
    return _apply_fused_tap(arrive, run, gradient, operands, input, *ends)


def dummies_like(output: Tensor, keep: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return stride-0 templates for `keep` and the gradient of `output`."""
    return tuple(torch.zeros((), dtype=_dummy_dtype(x), device=x.device).expand(x.shape) for x in (*keep, output))


def _dummy_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a dummy: float64 for integers, which it holds exactly."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.float64
