"""One process: parameters are whole, gradients are in `.grad`, and one rank sees every sample.

[Note: Guarding the gradients]
Between an anchor and the noise a clipped sum lies in the open: in `.grad`, where anything may reach it. So
- a hook on every parameter lets only the very tensor pass that its anchor has returned: autograd would hand a sum of
  several paths as another tensor;
- a second hook notes `.grad` as backward left it: the tensor, its version, and a checksum of its bits. Before more is
  added, or noise, they must be the same. What lies between (clip_grad_norm_, an unscaling, zero_grad, an optimizer that
  is none of torch) would change what was accounted, or use it without noise. The version tells of writes that change no
  bit, as zero_() on zeros; the checksum of those that torch does not count: through `.data`, and by torch._foreach_*,
  that is clip_grad_norm_, on shards;
- hooks of others on a parameter are refused, for they see and change gradients before the noise.
Only a backward pass that has failed may be thrown away: its sums are incomplete anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpshard.errors import ConfigurationError, LogicalBatchError, UnsupportedParameterError
from dpshard.names import WRAPPERS, canonical_name

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

WIDE = (torch.float32, torch.float64)
_DTYPES = (*WIDE, torch.bfloat16, torch.float16)


class LocalBackend:
    """Gradients of a model that lives whole in one process.

    Raises ConfigurationError for parameters that cannot be trained privately: complex or lazy ones, and two of a name.
    """

    rank = 0
    world_size = 1

    def __init__(self, model: nn.Module) -> None:
        self.core = model  # the module whose parameter names count
        self.outermost = model
        """The module whose call is a forward of the training: the model, in what wraps it."""
        named = list(model.named_parameters())
        _check_parameters(named)
        self.parameters = {canonical_name(n): p for n, p in named if p.requires_grad}
        self.anchored: Mapping[str, Tensor] = self.parameters
        """What the anchors differentiate."""
        self.differentiated: Mapping[str, Tensor] = self.parameters
        """What plain autograd differentiates."""
        self.two_passes = True
        """Whether a graph can be differentiated twice."""
        self.frozen = {canonical_name(n): p for n, p in named if not p.requires_grad}
        self.watching = True
        # A reference, not an address: the memory of a gradient that never arrived must not lend its address to another.
        self._delivered: dict[str, Tensor] = {}
        self._sums: dict[str, _Noted] = {}
        self._wide_sums: dict[str, Tensor] = {}
        self._backward = -1  # number of the backward pass that delivers, until it has come to its end
        self._failed = False  # whether a backward pass of this logical batch did not come to its end
        self._handles = [
            handle
            for name, p in self.parameters.items()
            for handle in (p.register_hook(self._guard(name)), p.register_post_accumulate_grad_hook(self._note(name)))
        ]

    def refuse_changed_parameters(self) -> None:
        """Raise UnsupportedParameterError if the model holds a trainable parameter that the engine does not know."""
        for name, parameter in self.core.named_parameters():
            if parameter.requires_grad and not self._knows(canonical_name(name), parameter):
                raise UnsupportedParameterError(
                    f"{name} became trainable, or replaced another parameter, after the engine was made: nobody would "
                    f"clip its gradient. Unfreeze, add and load parameters before making the engine; or call "
                    f"engine.state_dict() and engine.detach(), and make a new engine."
                )

    def _knows(self, name: str, parameter: nn.Parameter) -> bool:
        return self.parameters.get(name) is parameter

    @property
    def held(self) -> set[Tensor]:
        """The tensors by which an optimizer is known to step on the model."""
        return set(self.parameters.values())

    @property
    def shapes(self) -> dict[str, Sequence[int]]:
        """Shapes of the whole parameters."""
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The parameters as forward sees them, with which derivations are replayed."""
        return self.differentiated

    # --- during backward --------------------------------------------------------------------------------------------

    def reduce(self, names: Sequence[str], take: Callable[[str], Tensor | None]) -> list[Tensor | None]:
        """The gradients that an anchor returns for its parameters, given how to take their clipped sums."""
        self._begin()
        self._require_untouched(names)
        return [self._gradient(name, take(name)) for name in names]

    def _begin(self) -> None:
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return
        self._failed = self._failed or self._backward != -1
        self._backward = number
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._backward = -1

    def _gradient(self, name: str, clipped_sum: Tensor | None) -> Tensor | None:
        """The gradient of one parameter; None if there is none, or if the sum is kept here in float32.

        Half-precision parameters have half-precision `.grad`s, in which micro-batches must not accumulate.
        """
        parameter = self.parameters[name]
        if clipped_sum is None or not parameter.requires_grad:  # frozen since
            return None
        if parameter.dtype in WIDE:
            gradient = clipped_sum.to(parameter.dtype)
            self._delivered[name] = gradient
            return gradient
        wide = self._wide_sums.get(name)
        self._wide_sums[name] = clipped_sum if wide is None else wide + clipped_sum
        # Zeros stand in for it in `.grad`, so that whoever drops or changes gradients is noticed here too.
        self._delivered[name] = torch.zeros_like(parameter)
        return self._delivered[name]

    def _guard(self, name: str) -> Callable[[Tensor | None], None]:
        def check(gradient: Tensor | None) -> None:
            if not self.watching or gradient is None:
                return
            if self._delivered.pop(name, None) is not gradient:
                raise UnsupportedParameterError(
                    f"{name}: a gradient reached it on a way that dpshard does not see, so it is not clipped. Typical "
                    f"causes: a regularisation term on the parameter outside the model's forward (use the optimizer's "
                    f"weight_decay), torch.jit.script code, a custom autograd.Function, the parameter used outside of "
                    f"any module call, or a forward in eval mode (call model.train())."
                )

        return check

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._remember(name)

        return note

    def _remember(self, name: str) -> None:
        """Note `.grad` as it is now: whoever changes it before the noise is in is noticed."""
        gradient = self.parameters[name].grad
        if gradient is not None:
            self._sums[name] = _Noted(gradient, self._versions(gradient), checksum(self._local(gradient)))

    def unwatched(self) -> AbstractContextManager[Any]:
        """A block in which plain gradients may reach the parameters: they go to nobody's `.grad`."""
        return _Unwatched(self)

    def probing(self) -> AbstractContextManager[Any]:
        """A block of forwards after which no backward comes."""
        return self.unwatched()

    # --- between backward and the noise -----------------------------------------------------------------------------

    def refuse_stale_gradients(self) -> None:
        """Raise LogicalBatchError if a parameter still has a gradient of an earlier step."""
        for name, parameter in self.parameters.items():
            if self._holds_anything(parameter.grad):
                raise LogicalBatchError(
                    f"{name} still has a gradient from before this logical batch. Call optimizer.zero_grad() after "
                    f"every optimizer.step() and before the first backward(). If no optimizer holds {name}, freeze it "
                    f"before making the engine, or call model.zero_grad()."
                )

    def _require_untouched(self, names: Iterable[str]) -> None:
        """Raise LogicalBatchError if gradients are not what backward has left; see [Note: Guarding the gradients]."""
        if self._failed and self._thrown_away():
            self._forget_sums()
            self._failed = False
        names = list(names)
        for name in names:
            self._refuse_hooks(name, self.parameters[name])
        touched = next((name for name in names if not self._is_untouched(name)), None) or self._rewritten(names)
        if touched is None:
            return
        self._forget_sums()  # what is left is lost; zero_grad() then makes a fresh start
        if not self._holds_anything(self.parameters[touched].grad):
            raise LogicalBatchError(
                f"The clipped sum of {touched} was thrown away before it was released. Call zero_grad() after "
                f"optimizer.step() alone: not between the micro-batches of one logical batch, nor to skip a step. "
                f"(A gradient that an optimizer of your own has used was not private: torch.optim optimizers get "
                f"their noise by themselves, for any other call engine.privatize() first.)"
            )
        raise LogicalBatchError(
            f"The gradient of {touched} was changed between backward() and the noise, so its sensitivity is not the "
            f"one that was accounted. To clip, scale, log or set gradients, call engine.privatize() first."
        )

    def _thrown_away(self) -> bool:
        """Whether zero_grad() was called. That all gradients are zero does not tell: they may be stand-ins."""
        empty = not any(self._holds_anything(p.grad) for p in self.parameters.values())
        return empty and not all(self._is_untouched(name) for name in self.parameters)

    def _is_untouched(self, name: str) -> bool:
        """Whether the gradient of a parameter is the tensor that backward has left, as far as torch tells."""
        gradient, noted = self.parameters[name].grad, self._sums.get(name)
        if noted is None:
            return not self._holds_anything(gradient)  # zero_grad(set_to_none=False)
        return gradient is noted.gradient and self._versions(noted.gradient) == noted.versions

    def _versions(self, gradient: Tensor) -> tuple[int, int]:
        return gradient._version, self._local(gradient)._version

    def _rewritten(self, names: Iterable[str]) -> str | None:
        """Name of a gradient that has other bits than backward has left."""
        noted = {name: self._sums[name] for name in names if name in self._sums}
        differ = [checksum(self._local(x.gradient)) != x.checksum for x in noted.values()]
        if not differ:
            return None
        # Read all at once: an accelerator is waited for once.
        flags = torch.stack([x.to(differ[0].device) for x in differ]).cpu()
        return next((name for name, changed in zip(noted, flags, strict=True) if bool(changed)), None)

    def _refuse_hooks(self, name: str, parameter: Tensor) -> None:
        hooks = len(parameter._backward_hooks or ()) + len(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        )
        if hooks > 2:
            raise UnsupportedParameterError(
                f"{name} has a gradient hook that is not dpshard's. It would see and change gradients before the noise "
                f"is in. Remove it, and look at gradients after engine.privatize(); an optimizer that steps within "
                f"backward() cannot be private."
            )

    def complete_sums(self) -> None:
        """Called once per logical batch, before its sums are looked at: what is still to be summed over ranks, is."""

    def signal_norm(self) -> Tensor:
        """L2 norm of the clipped sum over all parameters; LogicalBatchError if somebody else has changed it."""
        self._require_untouched(self.parameters)
        sums = [self._sum_of(name) for name in self.parameters]
        norms = [_norm(x).cpu() for x in sums if x is not None]
        return self._over_shards(torch.stack(norms).square().sum() if norms else torch.zeros(())).sqrt()

    def _sum_of(self, name: str) -> Tensor | None:
        gradient = self.parameters[name].grad
        return self._wide_sums.get(name, None if gradient is None else self._local(gradient))

    # --- what sharding changes --------------------------------------------------------------------------------------

    def _local(self, x: Tensor) -> Tensor:
        """The part of a parameter or gradient that this rank holds."""
        return x

    def _holds_anything(self, gradient: Tensor | None) -> bool:
        return gradient is not None and bool(self._local(gradient).any())

    def _start(self, name: str) -> int:
        """Where that part begins in the flattened parameter."""
        return 0

    def _assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient

    def _over_shards(self, x: Tensor) -> Tensor:
        """Sum of a scalar over the ranks that hold different shards."""
        return x

    def gathers(self, module: nn.Module) -> bool:
        """Whether hooks around the forward of `module` gather and free its parameters."""
        return False

    def gather(self, module: nn.Module) -> None:
        """Gather the parameters of `module` now."""

    def bind(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Names and tensors of parameters that exist only while `module` runs."""
        return ()

    def share(self, secret: bytes) -> bytes:
        """The secret of rank 0, on every rank."""
        return secret

    def stack(self, x: Tensor) -> Tensor:
        """The vectors `x` of all ranks that share the data, as rows."""
        return x[None]

    def differing(self, facts: Mapping[str, Any]) -> list[str]:
        """Names of the facts (plain values) on which ranks disagree; every rank hands over the same names."""
        digests = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in facts.values())
        ranks_WFD = self.stack(torch.tensor(list(digests), dtype=torch.uint8)).cpu().unflatten(1, (len(facts), -1))
        agree_F = (ranks_WFD == ranks_WFD[0]).all(2).all(0)
        return [name for name, agree in zip(facts, agree_F.tolist(), strict=True) if not agree]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """A block in which one micro-batch of a logical batch is worked on."""
        return nullcontext()

    def privatize(self, add_noise: Callable[[Tensor, str, int], object], divisor: float) -> None:
        """Turn every clipped sum into (sum + noise) / divisor; a parameter without a gradient gets its noise too.

        `add_noise` takes a rank's shard, the parameter's name, and the place of the shard in the flattened parameter.

        A parameter that was frozen since, and has no gradient, is left alone: its optimizer would move it.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                total = self._sum_of(name)
                if total is None and not parameter.requires_grad:
                    continue
                if total is None:
                    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                    shard = self._local(parameter)
                    total = torch.zeros(shard.shape, dtype=dtype, device=shard.device)
                total = total if total.dtype in WIDE else total.float()
                add_noise(total, name, self._start(name))
                total.div_(divisor)
                if parameter.grad is None or total is not self._local(parameter.grad):
                    self._assign(parameter, total.to(parameter.dtype))
        self._reset()

    def training_state(self, optimizer: Any) -> TrainingState:
        """Model and optimizer as a checkpoint sees them; `optimizer` is the one that steps on the model."""
        from dpshard.backends.training_state import NamedState  # a training without checkpoints does not wait for it

        names: dict[Tensor, str] = {p: name for name, p in (self.parameters | self.frozen).items()}
        return NamedState(self.outermost, optimizer, names)

    def hand_over(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer that is about to step on `held` looks for them."""

    def drop_gradients(self) -> None:
        """Forget clipped sums that were not privatized."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._reset()

    def _forget_sums(self) -> None:
        self._wide_sums.clear()
        self._sums.clear()

    def _reset(self) -> None:
        self._forget_sums()
        self._delivered.clear()
        self._backward, self._failed = -1, False

    def detach(self) -> None:
        """Remove every trace from the parameters."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A gradient as backward has left it."""

    gradient: Tensor
    versions: tuple[int, int]
    """Of the gradient, and of this rank's shard of it."""
    checksum: Tensor
    """[], int64."""


def checksum(x: Tensor) -> Tensor:
    """Sum [] of the bits of `x`, as int64 words that wrap around: exact in any order, at the speed of memory."""
    octets = x.detach().contiguous().view(-1).view(torch.uint8)
    start = -octets.storage_offset() % 8  # words are aligned
    stop = start + (len(octets) - start) // 8 * 8
    if stop <= start:
        return octets.sum()
    total = octets[start:stop].view(torch.int64).sum()
    rest = torch.cat([octets[:start], octets[stop:]])
    return total + rest.sum() if len(rest) else total


def _norm(x: Tensor) -> Tensor:
    """L2 norm [] of `x` in float64, part by part: a copy of a large tensor in float64 costs more than its norm."""
    parts = x.detach().reshape(-1).split(2**20)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]).double())


class _Unwatched:
    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend

    def __enter__(self) -> None:
        self.before, self.backend.watching = self.backend.watching, False

    def __exit__(self, *_: object) -> None:
        self.backend.watching = self.before


def _check_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    seen: set[str] = set()
    for name, parameter in named:
        canonical = canonical_name(name)
        if canonical in seen:
            raise ConfigurationError(
                f"{name}: another parameter has the name {canonical!r} too, once the names that wrappers add "
                f"({WRAPPERS}) are left out; noise is keyed by it. Rename one of the modules."
            )
        seen.add(canonical)
        if not parameter.requires_grad:
            continue
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{name} is not initialised yet (a lazy module): run one forward under torch.no_grad() before making "
                f"the engine."
            )
        if parameter.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is of {parameter.dtype}; private training knows {', '.join(str(d)[6:] for d in _DTYPES)}. "
                f"Freeze it with requires_grad_(False), or store it as real numbers (torch.view_as_real)."
            )
