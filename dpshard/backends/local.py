"""One process: parameters are whole, gradients are in `.grad`, and one rank sees every sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpshard.backends.guard import Guard
from dpshard.errors import ConfigurationError, LogicalBatchError, UnsupportedParameterError
from dpshard.names import WRAPPERS, canonical_name
from dpshard.noise.keyed import Shard

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
        self._wide_sums: dict[str, Tensor] = {}
        self._backward = -1  # number of the backward pass that delivers, until it has come to its end
        self._failed = False  # whether a backward pass of this logical batch did not come to its end
        self.guard = Guard(self.parameters, self._local, self._accumulated, self._in_training)

    def refuse_changed_parameters(self) -> None:
        """Raise UnsupportedParameterError if the model holds a trainable parameter that the engine does not know."""
        for name, parameter in self.core.named_parameters():
            if parameter.requires_grad and not self._knows(canonical_name(name), parameter):
                raise UnsupportedParameterError(
                    f"{name} became trainable, or replaced another parameter, after the engine was made: nobody would "
                    f"clip its gradient. Unfreeze, add and load parameters before making the engine; or call "
                    f"engine.state_dict() and engine.detach(), and make a new engine."
                )

    def _in_training(self) -> bool:
        return self.core.training or self.outermost.training

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
        begins = self._begin()
        self._require_untouched(self._to_check(names, begins=begins))
        return [self._gradient(name, take(name)) for name in names]

    def _to_check(self, names: Sequence[str], *, begins: bool) -> Collection[str]:
        """Parameters whose gradients must be as backward has left them, before an anchor adds its sums to `names`.

        `begins`: whether the anchor is the first one of this backward pass.
        """
        return names

    def _begin(self) -> bool:
        """Whether a backward pass begins with this call; `_end` is called when it is through."""
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return False
        self._failed = self._failed or self._backward != -1
        self._backward = number
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return True

    def _end(self) -> None:
        self._backward = -1

    def _gradient(self, name: str, clipped_sum: Tensor | None) -> Tensor | None:
        """The gradient of one parameter; None if there is none, zeros if the sum is kept here in float32.

        Half-precision parameters have half-precision `.grad`s, in which micro-batches must not accumulate.
        """
        parameter = self.parameters[name]
        if clipped_sum is None or not parameter.requires_grad:  # frozen since
            return None
        if parameter.dtype in WIDE:
            return self.guard.expect(name, clipped_sum.to(parameter.dtype))
        wide = self._wide_sums.get(name)
        self._wide_sums[name] = clipped_sum if wide is None else wide + clipped_sum
        # Zeros stand in for it in `.grad`, so that whoever drops or changes gradients is noticed here too.
        return self.guard.expect(name, torch.zeros_like(parameter))

    def _accumulated(self, name: str) -> None:
        """Called when autograd has added to the gradient of a parameter."""
        self.guard.note(name)

    def unwatched(self) -> AbstractContextManager[Any]:
        """A block in which plain gradients may reach the parameters: they go to nobody's `.grad`."""
        return self.guard.unwatched()

    def probing(self) -> AbstractContextManager[Any]:
        """A block of forwards after which no backward comes."""
        return self.unwatched()

    # --- between backward and the noise -----------------------------------------------------------------------------

    def refuse_stale_gradients(self) -> None:
        """Raise LogicalBatchError if a parameter still has a gradient of an earlier step."""
        for name in self.parameters:
            if self.guard.holds_anything(name):
                raise LogicalBatchError(
                    f"{name} still has a gradient from before this logical batch. Call optimizer.zero_grad() after "
                    f"every optimizer.step() and before the first backward(). If no optimizer holds {name}, freeze it "
                    f"before making the engine, or call model.zero_grad()."
                )

    def _require_untouched(self, names: Collection[str], beside: Tensor | None = None) -> list[int]:
        """Raise LogicalBatchError if gradients are not what backward has left; see [Note: Guarding the gradients]."""
        if self._failed and self.guard.all_thrown_away():
            self._forget_sums()
            self._failed = False
        try:
            return self.guard.require_untouched(names, beside)
        except LogicalBatchError:
            self._forget_sums()  # what is left is lost; zero_grad() then makes a fresh start
            raise

    def complete_sums(self, doubts: Tensor | None = None) -> list[int]:
        """Called once per logical batch, before its noise: what is still to be summed over ranks, is.

        LogicalBatchError if somebody else has changed a sum. Returns the largest values of `doubts` (int64, on the
        device) over all ranks, which are read together with what is read anyway.
        """
        return self._require_untouched(self.parameters, doubts)

    def _sum_of(self, name: str) -> Tensor | None:
        gradient = self.parameters[name].grad
        return self._wide_sums.get(name, None if gradient is None else self._local(gradient))

    # --- what sharding changes --------------------------------------------------------------------------------------

    def _local(self, x: Tensor) -> Tensor:
        """The part of a parameter or gradient that this rank holds."""
        return x

    def _full(self, x: Tensor) -> Tensor:
        """All of a parameter or gradient, of which `x` may be the part that this rank holds."""
        return x

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

    def privatize(self, release_: Callable[[Sequence[Shard]], Tensor]) -> Tensor:
        """Turn every clipped sum into a private gradient; a parameter without a gradient gets its noise too.

        `release_` takes the shards of this rank, does so in place, and returns the L2 norm that they had, float64.
        Returns the L2 norm of the clipped sum, [], on the CPU.

        A parameter that was frozen since, and has no gradient, is left alone: its optimizer would move it.
        """
        shards: list[Shard] = []
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                total = self._sum_of(name)
                if total is None and not parameter.requires_grad:
                    continue
                if total is None:
                    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                    shard = self._local(parameter)
                    total = torch.zeros(shard.shape, dtype=dtype, device=shard.device)
                shards.append(Shard(name, total if total.dtype in WIDE else total.float(), self._start(name)))
            norm = release_(shards).cpu()  # an accelerator is waited for once
            for shard in shards:
                parameter, total = self.parameters[shard.name], shard.local
                if parameter.grad is None or total is not self._local(parameter.grad):
                    self._assign(parameter, total.to(parameter.dtype))
        self._reset()
        return self._over_shards(norm.square()).sqrt()

    def full_gradient(self, name: str) -> Tensor | None:
        """All of a parameter's private gradient, on every rank, after `privatize` and before the optimizer's step.

        All ranks call it, for the same names in the same order. None if the optimizer will find no gradient.
        """
        gradient = self.parameters[name].grad
        return None if gradient is None else self._full(gradient)

    def full_value(self, name: str) -> Tensor:
        """All of a parameter that the optimizer steps on, on every rank; called like `full_gradient`."""
        return self._full(self.parameters[name].detach())

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
        self.guard.forget()

    def _reset(self) -> None:
        self._forget_sums()
        self.guard.reset()
        self._backward, self._failed = -1, False

    def detach(self) -> None:
        """Remove every trace from the parameters."""
        self.guard.detach()


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
