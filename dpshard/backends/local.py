"""One process: parameters are whole, gradients are in `.grad`, and one rank sees every sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpshard.backends.guard import Guard
from dpshard.backends.model_parallel import whole_samples
from dpshard.errors import ConfigurationError, DpshardError, LogicalBatchError, UnsupportedParameterError
from dpshard.names import WRAPPERS, canonical_name
from dpshard.noise.digest import LANES
from dpshard.noise.keyed import Shard
from dpshard.records import accum_dtype, as_real, wide

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_DTYPES = (*WIDE, torch.bfloat16, torch.float16)


class LocalBackend:
    """Gradients of a model that lives whole in one process.

    Raises ConfigurationError for parameters that cannot be trained privately: lazy ones, and two of a name.
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

    def refuse_hooks(self) -> None:
        """Raise UnsupportedParameterError if somebody else has put a hook on a parameter."""
        for name in self.parameters:
            self.guard.refuse_hooks(name)

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

    def guard_disabled(self) -> AbstractContextManager[Any]:
        """A block in which plain gradients may reach the parameters: they go to nobody's `.grad`."""
        return self.guard.guard_disabled()

    def dry_run(self) -> AbstractContextManager[Any]:
        """A block of forwards after which no backward comes; ConfigurationError if ranks share samples in them."""
        stack = ExitStack()
        stack.enter_context(self.guard_disabled())
        stack.enter_context(whole_samples())
        return stack

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

    def _require_untouched(self, names: Collection[str]) -> None:
        """Raise LogicalBatchError if gradients are not what backward has left; see [Note: Guarding the gradients]."""
        if self._failed and self.guard.all_thrown_away():
            self._forget_sums()
            self._failed = False
        try:
            self.guard.require_untouched(names)
        except LogicalBatchError:
            self._forget_sums()  # what is left is lost; zero_grad() then makes a fresh start
            raise

    def complete_sums(
        self, broken: bool, doubts_F: Tensor, digest: Callable[[Sequence[Shard]], Tensor]
    ) -> tuple[list[int], list[int]]:
        """Sum what is still to be summed over ranks; called once per logical batch, before its noise.

        Args:
            broken: Whether the logical batch is broken on this rank.
            doubts_F: What else speaks against the release on this rank, int64, 0 for nothing.
            digest: Takes the shards of this rank; returns their contribution to the digest of the sums, int64 [L].

        Returns `broken` and the largest doubts of all ranks; and the digest, if nothing speaks against the release.
        LogicalBatchError, on all ranks, if somebody else has changed a sum.
        """
        fault = None if broken else self._fault()
        own_X = torch.cat([doubts_F.new_tensor([fault is not None, broken]), doubts_F])
        if self._is_unsummed:  # all ranks enter the collectives that follow, or none
            found = self._verdict(self.stack(own_X).cpu(), fault)
            if any(found):
                return found, []
            self._sum_rest()
        with torch.no_grad():
            part_L = own_X.new_zeros(LANES) if broken or fault is not None else digest(self._shards())
        ranks_WX = self.stack(torch.cat([own_X, part_L.to(own_X.device)])).cpu()  # an accelerator is waited for once
        found = self._verdict(ranks_WX[:, :-LANES], fault)
        return found, [] if any(found) else self._whole_digest(ranks_WX[:, -LANES:]).tolist()

    def _verdict(self, ranks_WX: Tensor, fault: DpshardError | None) -> list[int]:
        """Return the largest of every column behind the first, which says who has a fault; raise if anybody has."""
        if fault is not None:
            raise fault
        faulty = ranks_WX[:, 0].tolist()
        if any(faulty):
            self._forget_sums()
            raise LogicalBatchError(
                f"Rank {faulty.index(1)} has refused the clipped sums of this logical batch, and its error says why. "
                f"zero_grad() then makes a fresh start on all ranks."
            )
        return ranks_WX[:, 1:].amax(0).tolist()

    @property
    def _is_unsummed(self) -> bool:
        """Whether `_sum_rest` has sums to reduce over ranks."""
        return False

    def _sum_rest(self) -> None:
        """Reduce the sums that were not reduced in backward."""

    def runs_everywhere(self, *, last: bool) -> bool:
        """Whether every rank must run a micro-batch, also one of padding only, for others wait for it."""
        return False

    def _fault(self) -> DpshardError | None:
        """Why the sums of this rank must not be released, if there is a reason."""
        try:
            self._require_untouched(self.parameters)
        except (LogicalBatchError, UnsupportedParameterError) as error:
            return error
        return None

    def _whole_digest(self, ranks_WL: Tensor) -> Tensor:
        """The digest [L] of the sums, of what each rank contributes."""
        return ranks_WL.sum(0)

    def _totals(self) -> dict[str, Tensor]:
        """Return what this rank holds of the sums, by name, in float32 or wider; zeros where no gradient arrived.

        A parameter that was frozen since, and has no gradient, is left out: its optimizer would move it.
        """
        totals: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            total = self._sum_of(name)
            if total is None and not parameter.requires_grad:
                continue
            if total is None:
                shard = self._local(parameter)
                total = torch.zeros(shard.shape, dtype=accum_dtype(shard), device=shard.device)
            totals[name] = wide(total)
        return totals

    def _shards(self) -> list[Shard]:
        """Return the sums of this rank as the noise sees them."""
        return [self._shard(name, total) for name, total in self._totals().items()]

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

    def mismatches(self, facts: Mapping[str, Any]) -> list[str]:
        """Names of the facts (plain values) on which ranks disagree; every rank hands over the same names."""
        digests = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in facts.values())
        ranks_WFD = self.stack(torch.tensor(list(digests), dtype=torch.uint8)).cpu().unflatten(1, (len(facts), -1))
        agree_F = (ranks_WFD == ranks_WFD[0]).all(2).all(0)
        return [name for name, agree in zip(facts, agree_F.tolist(), strict=True) if not agree]

    @property
    def layout(self) -> str:
        """How ranks share the model, in words."""
        return "one process"

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """A block in which one micro-batch of a logical batch is worked on."""
        return nullcontext()

    def privatize(self, release_: Callable[[Sequence[Shard]], Tensor]) -> Tensor:
        """Turn every clipped sum into a private gradient; a parameter without a gradient gets its noise too.

        `release_` takes the shards of this rank, does so in place, and returns the L2 norm that they had, float64.
        Returns the L2 norm of the clipped sum, [].
        """
        with torch.no_grad():
            totals = self._totals()
            norm = release_([self._shard(name, total) for name, total in totals.items()])
            for name, total in totals.items():
                parameter = self.parameters[name]
                if parameter.grad is None or total is not self._local(parameter.grad):
                    self._assign(parameter, total.to(parameter.dtype))
        self._reset()
        return self._over_shards(norm.square()).sqrt()

    def _shard(self, name: str, total: Tensor) -> Shard:
        """What noise is added to: of a complex sum its two parts, each of which gets its own."""
        return Shard(name, as_real(total), self._start(name) * (2 if total.is_complex() else 1))

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

    def install_gradients(self, held: set[Tensor]) -> None:
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
                f"Freeze it with requires_grad_(False), or cast it."
            )
