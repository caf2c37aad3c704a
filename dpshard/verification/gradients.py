"""Compare the per-sample gradients of a micro-batch with those of each sample alone, by plain autograd."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.parts import Parts
from dpshard.clipping.tape import ClippedSums, Clipper, Roots, Tape
from dpshard.errors import REENTRANT, DpshardError, UnsupportedParameterError, VerificationError
from dpshard.interception import is_placed
from dpshard.verification.count_sketch import Sketch
from dpshard.verification.input_gradients import Gradients, InputGradients
from dpshard.verification.objectives import Objective
from dpshard.verification.repeated_call import RepeatedCall, gathered
from dpshard.verification.samples import replaced
from dpshard.verification.tolerances import tolerance_across_sizes

MAGNIFIED = 1e3
_LARGEST = 1e18
"""Largest norm that is compared; squares of larger norms overflow float32."""
_UNRESOLVED = 1e-13
"""Norm below which differences do not count, because squares may underflow in float32."""


class Differentiated(Protocol):
    """Parameters to differentiate."""

    parameters: dict[str, nn.Parameter]

    def tensors_of(self, name: str) -> Sequence[Tensor]:
        """Return the tensors that forwards use for a parameter; its gradient is the sum of theirs."""
        ...


class Found:
    """A Sink for verification: norms by group, and sketched clipped sums by parameter."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.norms: dict[int, Tensor] = {}
        self.sums: dict[str, Sketch] = {}

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Store the norms of a group."""
        self.norms[group.index] = norm_B

    def deliver(self, sums: ClippedSums) -> list[None]:
        """Sketch the clipped sums; return no gradients."""
        for name in sums.names:
            total, parts = sums.take(name), self._roots.parts
            if parts is not None:
                total = parts.whole_sum(name, total, self._roots.values[name])
            if total is not None:
                self.sums[name] = Sketch.of(total)
        return [None] * len(sums.names)


_Taken = tuple[Found, Gradients]


def verify_gradients(
    repeated: RepeatedCall,
    backend: Differentiated,
    clipper: Clipper,
    objectives: Sequence[Objective],
    *,
    outlier: int | None = None,
    magnified: bool = False,
    both_orders: bool = False,
) -> None:
    """Raise VerificationError unless norms and clipped sums of the chosen samples together are those of each alone.

    `outlier`: the sample with scaled inputs, whose gradient has more rounding. `magnified`: scale gradients up, to
    trigger code that clips gradients of activations. `both_orders`: repeat with samples reversed, because one order
    may hide that the model sorts them.
    """
    size = MAGNIFIED if magnified else 1.0
    chosen, n = repeated.chosen, len(repeated.chosen)
    orders = [chosen, chosen[::-1]] if both_orders else [chosen]
    if outlier is not None:
        run = replaced(repeated.run, range(repeated.run.batch_size), [outlier])
        repeated = replace(repeated, run=run)
    inputs = InputGradients(repeated.run)
    repeated = replace(repeated, run=inputs.watched(repeated.run))
    repeated.state.rewind(repeated.draws)  # the last forward may have frozen parameters
    plain = {name: backend.tensors_of(name) for name, p in backend.parameters.items() if p.requires_grad}
    parameters = [x for tensors in plain.values() for x in tensors]
    parts = clipper.roots.parts
    # Experts meet samples of all ranks.
    experts = parts if parts is not None and parts.of_samples else None
    turns = [1.0] if experts is None else [float(rank == experts.rank) for rank in range(experts.size)]
    tolerance = tolerance_across_sizes(parameters, half=repeated.half)
    for objective in objectives:
        take = functools.partial(_together, repeated, clipper, objective, inputs, size=size)
        together = [take(chosen), *(_if_it_runs(take, order) for order in orders[1:])]
        singles, of_inputs = [], []
        for turn, i in itertools.product(turns, chosen):
            value = turn * size * objective(repeated.plain([i]), [i])
            with repeated.backward():
                singles.append(sketched_gradients(value, plain, parts, inputs.inputs))
            of_inputs.append(inputs.take())
        for order, result in zip(orders, together, strict=True):
            if result is None:
                continue
            found, gradients = result
            places = [turn * n + chosen.index(i) for turn in range(len(turns)) for i in order]
            alone, watched = [singles[k] for k in places], [i != outlier for i in order] * len(turns)
            norms = found.norms
            if experts is not None:
                norms = {i: experts.gather_samples(norm_B) for i, norm_B in sorted(norms.items())}
            verify_norms_and_sums(
                found.sums, alone, norms, clipper, parameters, half=repeated.half, watched=watched, size=size
            )
            if len(turns) == 1:
                ordered = [of_inputs[k] for k in places]
                inputs.verify(gradients, ordered, n if repeated.mean else 1, tolerance, watched)


def _together(
    repeated: RepeatedCall,
    clipper: Clipper,
    objective: Objective,
    inputs: InputGradients,
    samples: list[int],
    *,
    size: float,
) -> _Taken:
    found, n = Found(clipper.roots), len(samples)
    twin = clipper.twin(found)
    tape = functools.partial(Tape, twin, n, None, n if repeated.mean else 1)
    with repeated.verdict.forward():
        output = gathered(repeated.replay.recorded(repeated.run, samples, tape, repeated.state, repeated.draws))
    value = size * objective(output, samples)
    with repeated.backward():
        differentiate(value, [*twin.differentiated(), *inputs.inputs])
    return found, inputs.take()


def _if_it_runs(take: Callable[[list[int]], _Taken], samples: list[int]) -> _Taken | None:
    try:
        return take(samples)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DpshardError):
            raise
        return None


def differentiate(value: Tensor, parameters: list[Tensor]) -> None:
    """Run backward; hooks and anchors take the gradients."""
    if not parameters:
        return
    try:
        torch.autograd.grad(value, parameters, allow_unused=True)
    except RuntimeError as error:
        # These are messages of torch and of DeepSpeed.
        if "use_reentrant" not in str(error) and "Checkpointing is not compatible with .grad()" not in str(error):
            raise
        raise UnsupportedParameterError(REENTRANT) from error


def sketched_gradients(
    value: Tensor,
    parameters: Mapping[str, Sequence[Tensor]],
    parts: Parts | None = None,
    inputs: Sequence[Tensor] = (),
) -> dict[str, Sketch]:
    """Return sketches of the gradients by name, for DTensors of this rank's part; hold one gradient at a time."""
    found: dict[str, Sketch] = {}
    several: dict[str, Tensor] = {}

    def note(name: str, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # the parameter is in the graph, but gets no gradient
            return None
        own = gradient if parts is None else _own_part(name, gradient, parameter, parts)
        if len(parameters[name]) == 1:
            found[name] = Sketch.of(own)
        else:
            several[name] = several[name] + own if name in several else own
        if is_placed(gradient):
            return gradient
        return gradient.new_zeros(()).expand_as(gradient)  # backward keeps this; an expanded zero is small

    with ExitStack() as hooks:
        for name, tensors in parameters.items():
            for x in tensors:
                hooks.callback(x.register_hook(functools.partial(note, name, x)).remove)
        differentiate(value, [*(x for tensors in parameters.values() for x in tensors), *inputs])
    return found | {name: Sketch.of(total) for name, total in several.items()}


def _own_part(name: str, gradient: Any, parameter: Any, parts: Parts) -> Tensor:
    if is_placed(gradient):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    return parts.terms.summed(gradient) if parts.is_termwise(name) else gradient


def _of_all_parts(parts: Parts | None, squares: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return squared norms over all ranks with parts of the model. They must all call it with the same names."""
    values = [(name, x) for some in squares for name, x in some.items()]
    if parts is None or not values:
        return list(squares)
    squared = torch.tensor([x for _, x in values], dtype=torch.float64, device="cpu")
    add_up = torch.tensor([parts.is_cut(name) for name, _ in values], device="cpu")
    total = iter(parts.norm_sq_of_sums(squared.where(add_up, 0.0), squared.where(~add_up, 0.0)).tolist())
    return [{name: next(total) for name in some} for some in squares]


def verify_norms_and_sums(
    together: Mapping[str, Sketch],
    singles: Sequence[Mapping[str, Sketch]],
    norms: Mapping[int, Tensor],
    clipper: Clipper,
    parameters: Sequence[Tensor],
    *,
    half: bool,
    watched: Sequence[bool],
    size: float,
    causes: str | None = None,
) -> None:
    """Raise VerificationError unless `norms` and the sums `together` agree with those of `singles`."""
    tolerance = tolerance_across_sizes(parameters, half=half)
    eps = min(max((torch.finfo(p.dtype).eps for p in parameters), default=0.0), torch.finfo(torch.float32).eps)
    parts = clipper.roots.parts
    squares = _of_all_parts(parts, [{name: float(x.norm.square()) for name, x in single.items()} for single in singles])
    of_all_layers = [math.sqrt(sum(square.values())) for square in squares]
    # Training, too, drops and counts samples whose gradient, or its square, is not finite.
    finite = [norm < _LARGEST and keep for norm, keep in zip(of_all_layers, watched, strict=True)]
    if not any(finite):
        return
    of_all = all(finite)
    # A gradient whose terms cancel (the bias of attention's keys) has the rounding of these terms.
    rounding = 64 * eps * max(norm for norm, keep in zip(of_all_layers, finite, strict=True) if keep)
    rounding = max(rounding, _UNRESOLVED * size)  # blank samples
    for group in clipper.groups:
        if not group.names:
            continue  # these parameters are in another stage of the pipeline
        alone = [math.sqrt(sum(square[name] for name in group.names if name in square)) for square in squares]
        exact = torch.tensor(alone, dtype=torch.float64, device="cpu")
        found = norms.get(group.index, torch.zeros_like(exact)).double().cpu()
        norms_agree = (found - exact)[finite].abs().max() <= tolerance * exact[finite].max() + rounding
        if not of_all:
            if not bool(norms_agree):
                raise _failure(group, group.names[0], exact, found, causes)
            continue
        device = clipper.roots.values[group.names[0]].device  # in training, a user's function gets norms there
        factor = clipper.function.factor(exact.to(device), group.threshold).cpu()
        (off_sq,) = _of_all_parts(parts, [{name: _difference(name, together, singles, factor) for name in group.names}])
        off = {name: math.sqrt(x) for name, x in off_sq.items()}
        own = {name: [math.sqrt(square.get(name, 0.0)) for square in squares] for name in group.names}
        # Relative to one sample's contribution, because the sum may cancel.
        slack = rounding * float(factor.max())
        sums_agree = math.hypot(*off.values()) <= tolerance * float((factor * exact).max()) + slack
        # A group's norm may hide the small gradient of a balancing loss. Half precision rounds small gradients more.
        parts_agree = half or all(
            off[name] <= tolerance * max(f * x for f, x in zip(factor.tolist(), own[name], strict=True)) + slack
            for name in group.names
        )
        if not (bool(norms_agree) and sums_agree and parts_agree):
            raise _failure(group, max(off, key=lambda name: off[name]), exact, found, causes)


def _difference(
    name: str, together: Mapping[str, Sketch], singles: Sequence[Mapping[str, Sketch]], factor: Tensor
) -> float:
    image = together[name].image if name in together else torch.zeros((), dtype=torch.float64, device="cpu")
    for f, single in zip(factor, singles, strict=True):
        if name in single:
            image = image - f * single[name].image
    return float(image.square().sum())


def _failure(group: ClippingGroup, worst: str, exact: Tensor, found: Tensor, causes: str | None) -> VerificationError:
    if causes is not None:
        return VerificationError(
            f"{worst} (clipping group {group.label!r}): the gradients of {len(exact)} units in a stream differ from "
            f"those of each unit alone. Norms alone: {_list(exact)}; together: {_list(found)}. {causes}"
        )
    if other := _other_reduction(exact, found):
        return VerificationError(
            f"{worst} (clipping group {group.label!r}): {other} Norms alone: {_list(exact)}; together: {_list(found)}."
        )
    return VerificationError(
        f"{worst} (clipping group {group.label!r}): the gradients of {len(exact)} samples together differ from those "
        f"of each sample alone. Norms alone: {_list(exact)}; together: {_list(found)}. Likely causes: (1) A function "
        f"mixes the samples of a batch (BatchNorm, a contrastive, token-mean or load-balancing loss). Class weights "
        f"do: take reduction='none' and the mean. For tokens, "
        f"dpshard.losses.sample_losses takes each sample's own mean. (2) The reduction of the loss is not the "
        f"loss_reduction given to the engine. (3) The batch dimension is not dimension 0 of the inputs. (4) Random "
        f"numbers per row do not come from torch.rand, torch.randn or dropout (NumPy, torch.multinomial). (5) A "
        f"parameter is used outside of a module call, or inside a torch.autograd.Function. Turn off with "
        f"PrivacyEngine(verify=False) only if you can prove that every sample has a gradient of its own."
    )


def _other_reduction(exact: Tensor, found: Tensor) -> str | None:
    n = len(exact)
    if n > 1 and bool(exact.any()):
        if torch.allclose(found, n * exact, rtol=1e-3):
            return (
                f"the norms of {n} samples together are exactly {n} times too large. The loss is a sum over samples, "
                f"and the engine has loss_reduction='mean'. Give the engine loss_reduction='sum', or average the loss."
            )
        if torch.allclose(n * found, exact, rtol=1e-3):
            return (
                f"the norms of {n} samples together are exactly {n} times too small. The loss is a mean over samples, "
                f"and the engine has loss_reduction='sum'. Give the engine loss_reduction='mean', or sum the loss."
            )
    return None


def _list(values: Tensor) -> str:
    return "[" + ", ".join(f"{float(v):.4g}" for v in values) + "]"
