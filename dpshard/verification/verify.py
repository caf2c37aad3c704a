"""Start-up verification: a few samples together, through rules and anchors, against each one alone, through autograd.

It knows nothing of the architecture, so it catches whatever makes the two differ: a wrong batch dimension, a function
that mixes samples, a loss that divides by what other samples hold, a use of a parameter that got lost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpshard.clipping.functions import ClippingGroup
from dpshard.clipping.tape import Clipper, Take, Tape
from dpshard.errors import REENTRANT, DpshardError, UnsupportedParameterError, VerificationError
from dpshard.interception import Interception, Run, Undisturbed
from dpshard.rules.torch_functions import outputs_of
from dpshard.verification.count_sketch import Sketch

SAMPLES = 3
"""Samples compared: enough that two of them can disturb a third."""


class _Backend(Protocol):
    parameters: dict[str, nn.Parameter]
    differentiated: Mapping[str, Tensor]

    def unwatched(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the user's, to be differentiated in place of what the model returns."""

    loss_fn: Callable[..., Tensor]
    targets: tuple[Tensor, ...]

    def of(self, output: Any, samples: Sequence[int]) -> Tensor:
        """The loss of `samples`, whose output is given."""
        index = torch.tensor(list(samples))
        return self.loss_fn(output, *(t.index_select(0, index.to(t.device)) for t in self.targets))


class _Precision(TorchFunctionMode):
    """Notes whether a function returned half precision: also under autocast that the model enters by itself."""

    half = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.half = self.half or any(x.dtype in (torch.bfloat16, torch.float16) for x in outputs_of(result))
        return result


Objective = Callable[[Any, Sequence[int]], Tensor]
"""From the output for some samples, and their numbers, to the scalar that is differentiated."""


def _seeds(together: Sequence[Tensor], alone: Sequence[Tensor], n: int) -> list[tuple[Tensor, int | None, int]]:
    """Per output a random gradient for the batch, the dimension of the samples, and the rows of one sample."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for x, y in zip(together, alone, strict=True):
        dims = [d for d in range(x.dim()) if x.dim() == y.dim() and x.shape[d] != y.shape[d]]
        if x.dim() != y.dim() or len(dims) > 1 or (dims and x.shape[dims[0]] != n * y.shape[dims[0]]):
            raise VerificationError(
                f"An output has shape {tuple(x.shape)} for {n} samples and {tuple(y.shape)} for one of them: it does "
                f"not treat samples one by one. Hand the loss in: engine.verify(*inputs, loss_fn=..., targets=...)."
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        seed = torch.randn(x.shape, generator=generator, dtype=dtype).to(x.device, x.dtype)
        found.append((seed, dims[0] if dims else None, y.shape[dims[0]] if dims else 0))
    return found


def compare(
    interception: Interception, backend: _Backend, clipper: Clipper, run: Run, loss: Loss | None, *, mean: bool
) -> None:
    """Raise VerificationError unless norms and clipped sums of a few samples agree; changes nothing else.

    Differentiated are `loss` if it is given; else every scalar that the model returns, one after the other, and all
    its other outputs along a random direction. `mean`: whether losses average over their samples.
    """
    n = min(SAMPLES, run.rows)
    chosen = list(range(n))
    names = [name for name, p in backend.parameters.items() if p.requires_grad]

    with interception.undisturbed(run.module) as state, backend.unwatched(), torch.enable_grad():
        outputs, precision = [], _Precision()
        for samples in (chosen, [0]):
            state.rewind()
            with precision:
                outputs.append(_without_graph(_run_plain(interception, run, samples)))
        _refuse_memory(state, [lambda r=r, i=i: _run_plain(interception, r, [i]) for r, i in _two_inputs(run, n)])
        objectives = [loss.of] if loss is not None else _objectives(outputs[0], outputs[1], n, mean=mean)
        values, values_alone = _values(outputs[0]), list[list[Tensor]]()
        del outputs

        plain = {name: backend.differentiated[name] for name in names}
        for objective in objectives:
            norms: dict[int, Tensor] = {}
            together: dict[str, Sketch] = {}

            def deliver(names: Sequence[str], take: Take, together: dict[str, Sketch] = together) -> list[None]:
                together.update({name: Sketch.of(total) for name in names if (total := take(name)) is not None})
                return [None] * len(names)

            def observe(group: ClippingGroup, norm_B: Tensor, *_: Any, norms: dict[int, Tensor] = norms) -> None:
                norms[group.index] = norm_B

            beside = clipper.twin(deliver, observe)
            output = interception.run_recorded(
                run, chosen, functools.partial(Tape, beside, n, None, n if mean else 1), state
            )
            _differentiate(objective(output, chosen), beside.differentiated())
            singles = []
            for sample in chosen:
                state.rewind()
                output = _run_plain(interception, run, [sample])
                values_alone.append(_values(output))
                singles.append(_sketched_gradients(objective(output, [sample]), plain))
            _check(together, singles, norms, clipper, list(plain.values()), half=precision.half)
        if loss is None:
            for sample in chosen:
                _refuse_mixed_outputs(values, values_alone[sample], sample, n, precision.half)


def _run_plain(interception: Interception, run: Run, samples: list[int]) -> Any:
    """The model's output for some samples alone; VerificationError if it has none."""
    try:
        return interception.run_plain(run, samples)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DpshardError):
            raise
        raise VerificationError(
            f"{type(run.module).__name__} fails on {len(samples)} sample(s) of the micro-batch taken alone ({error}), "
            f"so they have no gradient of their own. Does it normalise over them (BatchNorm), need a fixed size, or "
            f"get what belongs to samples in a tensor without a dimension for them (flat ids with offsets: pass ids "
            f"[B, T], and flatten them in forward)?"
        ) from error


def _without_graph(output: Any) -> list[Any]:
    """The leaves of an output, which say whether they had a gradient, without the activations that it needs."""
    leaves = pytree.tree_leaves(output)
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]


def _two_inputs(run: Run, n: int) -> list[tuple[Run, int]]:
    """Two samples that differ, each as a run and its number; of a single one, itself and what it might have been."""
    if n > 1:
        return [(run, 0), (run, 1)]
    leaves = [x if dim is None else _another(x) for x, dim in zip(run.leaves, run.dims, strict=True)]
    return [(run, 0), (replace(run, leaves=tuple(leaves)), 0)]


def _another(x: Tensor) -> Tensor:
    """Other numbers than `x` [1, ...]; of ids such that there are."""
    if x.is_floating_point():
        return x / 2
    return x[..., :1].expand_as(x) if x.dim() > 1 else x


def _refuse_memory(state: Undisturbed, runs: Sequence[Callable[[], Any]]) -> None:
    """Raise UnsupportedParameterError if a buffer takes another value for another sample: later ones would see it."""
    seen = []
    for run in runs:
        state.rewind()
        run()
        seen.append(state.buffers())
    first, second = seen
    for name in first.keys() & second.keys():
        if first[name].is_floating_point() and not torch.equal(first[name], second[name]):
            raise UnsupportedParameterError(
                f"{name}: forward writes a function of the samples into this buffer, without noise, and later samples "
                f"may read it. Put the module in eval mode, or drop its running statistics (BatchNorm: use GroupNorm; "
                f"InstanceNorm: use track_running_stats=False)."
            )


def _objectives(together: Any, alone: Any, n: int, *, mean: bool) -> list[Objective]:
    """What to differentiate of a model's outputs, given those for n samples and for one of them."""
    leaves = [i for i, x in enumerate(pytree.tree_leaves(together)) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise VerificationError(
            "No output of the model depends on a trainable parameter in a differentiable way; there is nothing to "
            "train. Check requires_grad, and that the model returns tensors (or tuples, lists, dicts of them)."
        )
    pairs = {i: (pytree.tree_leaves(together)[i], pytree.tree_leaves(alone)[i]) for i in leaves}
    objectives: list[Objective] = [
        lambda output, _samples, i=i: pytree.tree_leaves(output)[i] for i in leaves if pairs[i][0].dim() == 0
    ]
    wide = [i for i in leaves if pairs[i][0].dim() > 0]
    if wide:
        seeds = _seeds([pairs[i][0] for i in wide], [pairs[i][1] for i in wide], n)

        def along(output: Any, samples: Sequence[int]) -> Tensor:
            found = pytree.tree_leaves(output)
            total = torch.zeros((), dtype=torch.float64, device=found[wide[0]].device)
            for i, (seed, dim, rows) in zip(wide, seeds, strict=True):
                if dim is not None and len(samples) < n:
                    seed = seed.narrow(dim, samples[0] * rows, rows)
                total = total + (found[i] * seed).sum()
            return total / len(samples) if mean else total

        objectives.append(along)
    return objectives


def _values(output: Any) -> list[Tensor]:
    return [x.detach() for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _refuse_mixed_outputs(together: Sequence[Tensor], alone: Sequence[Tensor], sample: int, n: int, half: bool) -> None:
    """Raise VerificationError if a sample has other outputs among others: a loss that is not linear depends on them.

    Gradients along a fixed direction do not tell, for what is detached has none (a score minus the batch's mean).
    """
    largest = max((float(y.double().nan_to_num(0, 0, 0).abs().amax()) for y in alone if y.numel()), default=0.0)
    for x, y in zip(together, alone, strict=True):
        dims = [d for d in range(x.dim()) if x.dim() == y.dim() and x.shape[d] != y.shape[d]]
        if len(dims) != 1 or x.shape[dims[0]] != n * y.shape[dims[0]]:
            continue
        rows = y.shape[dims[0]]
        x = x.narrow(dims[0], sample * rows, rows)
        equal = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(equal, 0, x.double() - y.double()).abs().amax() if y.numel() else torch.zeros(())
        scale = y.double().nan_to_num(0, 0, 0).abs().amax() if y.numel() else 0.0
        if not bool(apart <= _tolerance([x], half) * scale + 64 * torch.finfo(x.dtype).eps * largest):
            raise VerificationError(
                f"An output of shape {tuple(y.shape)} for sample {sample} is another one together with {n - 1} other "
                f"samples (by {float(apart):.4g}): the model mixes the samples of a batch under detach() or no_grad() "
                f"(a mean over the batch that is subtracted, weights that sum to 1 over it), so a loss of its outputs "
                f"is not the sample's own. Take what is subtracted, or divided by, from the sample alone."
            )


def _differentiate(value: Tensor, parameters: list[Tensor]) -> None:
    """Run backward from `value` to `parameters`; what they get is left to hooks and anchors."""
    if not parameters:
        return
    try:
        torch.autograd.grad(value, parameters, allow_unused=True)
    except RuntimeError as error:
        # What torch says, and DeepSpeed.
        if "use_reentrant" not in str(error) and "Checkpointing is not compatible with .grad()" not in str(error):
            raise
        raise UnsupportedParameterError(REENTRANT) from error


def _sketched_gradients(value: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Sketch]:
    """Sketches of the gradients of `value` by name, where there are any; one whole gradient is alive at a time."""
    found: dict[str, Sketch] = {}

    def note(name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # the graph gets there, but nothing came
            return None
        found[name] = Sketch.of(gradient)
        return gradient.new_zeros(()).expand_as(gradient)  # what backward keeps for its caller takes no memory

    with ExitStack() as hooks:
        for name, parameter in parameters.items():
            hooks.callback(parameter.register_hook(functools.partial(note, name)).remove)
        _differentiate(value, list(parameters.values()))
    return found


def _check(
    together: Mapping[str, Sketch],
    singles: Sequence[Mapping[str, Sketch]],
    norms: Mapping[int, Tensor],
    clipper: Clipper,
    parameters: Sequence[Tensor],
    *,
    half: bool,
) -> None:
    tolerance = _tolerance(parameters, half)
    eps = min(max((torch.finfo(p.dtype).eps for p in parameters), default=0.0), torch.finfo(torch.float32).eps)
    # A gradient that cancels (the bias of attention's keys) is the rounding of what it is a sum of.
    total = max((_norm(single.values()) for single in singles), default=0.0)
    rounding = 64 * eps * total if math.isfinite(total) else 0.0
    for group in clipper.groups:
        alone = [_norm(single[name] for name in group.names if name in single) for single in singles]
        exact = torch.tensor(alone, dtype=torch.float64, device="cpu")
        if not bool(torch.isfinite(exact).all()):
            continue  # such a sample is dropped, and counted, in training as well
        found = norms.get(group.index, torch.zeros_like(exact)).double().cpu()
        device = clipper.values[group.names[0]].device  # where a function of the user's own gets norms in training
        factor = clipper.function.factor(exact.to(device), group.threshold).cpu()
        off = {name: _difference(name, together, singles, factor) for name in group.names}
        own = {name: [float(s[name].norm) if name in s else 0.0 for s in singles] for name in group.names}
        norms_agree = (found - exact).abs().max() <= tolerance * exact.max() + rounding
        # Measured against one sample's contribution: contributions may cancel in the sum.
        slack = rounding * float(factor.max())
        sums_agree = math.hypot(*off.values()) <= tolerance * float((factor * exact).max()) + slack
        # A loss that balances experts is small, but not beside what else their router learns from. (In half precision
        # small gradients are rounded by more.)
        parts_agree = half or all(
            off[name] <= tolerance * max(f * x for f, x in zip(factor.tolist(), own[name], strict=True)) + slack
            for name in group.names
        )
        if not (bool(norms_agree) and sums_agree and parts_agree):
            raise _failure(group, max(off, key=lambda name: off[name]), exact, found)


def _norm(sketches: Iterable[Sketch]) -> float:
    """The norm of several gradients together."""
    return math.hypot(*(float(sketch.norm) for sketch in sketches))


def _difference(
    name: str, together: Mapping[str, Sketch], singles: Sequence[Mapping[str, Sketch]], factor: Tensor
) -> float:
    """The norm of the clipped sum of a parameter, less that of the samples alone."""
    image = together[name].image if name in together else torch.zeros((), dtype=torch.float64, device="cpu")
    for f, single in zip(factor, singles, strict=True):
        if name in single:
            image = image - f * single[name].image
    return float(image.norm())


_HALF_PRECISION = 5e-2


def _tolerance(tensors: Sequence[Tensor], half: bool) -> float:
    """Far above the rounding of two orders of summation, `half` in half precision; accelerators may take TF32."""
    if half or any(x.dtype in (torch.bfloat16, torch.float16) for x in tensors):
        return _HALF_PRECISION
    if any(x.dtype == torch.float32 for x in tensors):
        return 1e-4 if all(x.device.type == "cpu" for x in tensors) else 2e-2
    return 1e-6


def _failure(group: ClippingGroup, worst: str, exact: Tensor, found: Tensor) -> VerificationError:
    return VerificationError(
        f"{worst} (clipping group {group.label!r}): the gradients of {len(exact)} samples together are not those of "
        f"each sample alone. Norms alone: {_list(exact)}; together: {_list(found)}. Likely causes: a function that "
        f"mixes the samples of a batch (BatchNorm, a contrastive or token-mean loss, a load-balancing loss; of tokens "
        f"dpshard.losses.sample_losses takes each sample's own mean); a loss whose reduction is not the loss_reduction "
        f"given to the engine; a batch dimension that is not dimension 0 of the inputs; a parameter used outside of a "
        f"module call, or inside of a torch.autograd.Function. Turn off with "
        f"PrivacyEngine(verify=False) only if you can prove that every sample has a gradient of its own."
    )


def _list(values: Tensor) -> str:
    return "[" + ", ".join(f"{float(v):.4g}" for v in values) + "]"
