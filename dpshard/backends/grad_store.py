"""Clipped sums kept in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from dpshard.backends.backward_passes import BackwardPasses
from dpshard.backends.guard import Guard
from dpshard.backends.model_parts import ModelParts, Place
from dpshard.backends.roles import Take
from dpshard.errors import DpshardError, LogicalBatchError, UnsupportedParameterError
from dpshard.noise.keyed import SumShard
from dpshard.records import WIDE, accum_dtype, as_real


class GradShards(Protocol):
    """The Sharding of parameters that optimizers step on directly."""

    parameters: dict[str, nn.Parameter]
    guard: Guard

    @property
    def parts(self) -> ModelParts | None:
        """Ranks with parts of the model."""
        ...

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part."""
        ...

    def place(self, name: str) -> Place:
        """Return where this rank's part begins in the flattened parameter."""
        ...

    def assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put this rank's part in `.grad`."""
        ...

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole gradient."""
        ...

    def over_shards(self, x: Tensor) -> Tensor:
        """Sum over different shards."""
        ...


class DotGradStore:
    """Keeps clipped sums in `.grad`; those of half-precision parameters in float32, in `wide_sums`.

    Their `.grad` holds zeros, so that the guard detects a dropped or changed gradient.
    """

    def __init__(self, sharding: GradShards) -> None:
        self.passes = BackwardPasses()
        self.wide_sums: dict[str, Tensor] = {}
        """Float32 sums, summed over ranks."""
        self.unreduced: dict[str, Tensor] = {}
        """Sums of this rank's samples, to reduce later."""
        self._sharding, self._parameters, self._guard = sharding, sharding.parameters, sharding.guard
        self._totals: dict[str, tuple[Tensor, SumShard]] = {}  # digested, but not released
        self._places: dict[str, tuple[torch.Size, Place]] = {}

    # --- during backward

    def whole_sum(self, name: str, total: Tensor | None) -> Tensor | None:
        """Return a whole clipped sum; `total` may be this rank's slice of it."""
        parts = self._sharding.parts
        return total if parts is None else parts.whole_sum(name, total, self._parameters[name])

    def through_autograd(self, name: str, clipped_sum: Tensor | None, wide_sums: dict[str, Tensor]) -> Tensor | None:
        """Return the gradient by which autograd adds a sum to `.grad`; half-precision sums go to `wide_sums`."""
        parameter = self._parameters[name]
        if clipped_sum is None or not parameter.requires_grad:  # frozen since
            return None
        if parameter.dtype in WIDE:
            return self._guard.expect(name, clipped_sum.to(parameter.dtype))
        add(wide_sums, name, clipped_sum)
        return self._guard.expect(name, torch.zeros_like(parameter))

    def add_sums(self, names: Iterable[str], take: Take) -> None:
        """Add whole sums to `.grad` without autograd."""
        parameters, local, added = self._parameters, self._sharding.local, []
        in_parts = self._sharding.parts is not None
        for name in names:
            total, parameter = take(name), parameters[name]
            if in_parts:
                total = self.whole_sum(name, total)
            if total is None or not parameter.requires_grad:  # frozen since
                continue
            gradient = parameter.grad
            if parameter.dtype not in WIDE:
                add(self.wide_sums, name, total)
                self.stand_in(name)
                continue
            plain = type(parameter) is nn.Parameter or local(parameter) is parameter
            if not plain or total.device != parameter.device:
                self.add_shard(name, as_real(total))
                continue
            if gradient is not None:
                gradient.add_(total)
            else:
                # Counted here, not in a function: compilers add references to its arguments.
                alone = sys.getrefcount(total) <= _ALONE and total.dtype is parameter.dtype
                alone = alone and getattr(total, "_use_count")() == 1  # noqa: B009 - torch's own, not among the stubs
                alone = alone and total.stride() == parameter.stride()
                parameter.grad = total if alone else torch.empty_like(parameter).copy_(total)
            added.append(name)
        self._guard.note_all(added)

    def add_shard(self, name: str, shard: Tensor) -> None:
        """Add this rank's part of a sum, as real pairs if complex."""
        parameter = self._parameters[name]
        if not parameter.requires_grad:
            return
        shard = shard.to(self._sharding.local(parameter).device)
        if parameter.dtype in WIDE:
            if parameter.grad is None:
                # A copy: `shard` is a view of a buffer with other parameters.
                gradient = torch.empty_like(self._sharding.local(parameter))
                as_real(gradient).copy_(shard)
                self._sharding.assign(parameter, gradient)
            else:
                as_real(self._sharding.local(parameter.grad)).add_(shard)
        else:
            kept = self.wide_sums.get(name)
            self.wide_sums[name] = shard.clone() if kept is None else kept.add_(shard)
            self.stand_in(name)
        self._guard.note(name)

    def stand_in(self, name: str) -> None:
        """Put zeros in `.grad` for a sum kept elsewhere."""
        parameter = self._parameters[name]
        if parameter.requires_grad and parameter.grad is None:
            self._sharding.assign(parameter, torch.zeros_like(self._sharding.local(parameter)))
            self._guard.note(name)

    # --- between backward and the noise

    def begins(self, ended: Callable[[], object]) -> bool:
        """Return True if a backward pass begins now; `ended` is called at its end.

        Raise LogicalBatchError if a gradient's bits have changed.
        """
        begins = self.passes.begins(ended)
        if begins:
            self._forget_failed()
            with self._forgetting():
                self._guard.begin()
        return begins

    def compare_bits(self) -> None:
        """Raise LogicalBatchError if a gradient's bits have changed; keep all sums."""
        with torch.no_grad():
            self._guard.compare_bits()

    def require_untouched(self, names: Collection[str]) -> None:
        """Raise LogicalBatchError unless gradients are as backward left them."""
        self._forget_failed()
        with self._forgetting():
            self._guard.require_untouched(names)

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        try:
            with torch.no_grad():  # otherwise autograd records to_local()
                self.require_untouched(self._parameters)
                with self._forgetting():
                    self._guard.compare_bits()
                    self._guard.refuse_rewritten()
        except (LogicalBatchError, UnsupportedParameterError) as error:
            return error
        return None

    def _forget_failed(self) -> None:
        if self.passes.failed and self._guard.all_thrown_away():
            self.forget()
            self.passes.failed = False

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        try:
            yield
        except LogicalBatchError:
            self.forget()  # zero_grad() lets the script start afresh
            raise

    def refuse_stale(self) -> None:
        """Raise LogicalBatchError if an earlier step's gradient remains."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._guard.holds_anything(name):
                raise LogicalBatchError(
                    f"{name} still has a gradient from before this logical batch. Call optimizer.zero_grad() after "
                    f"every optimizer.step() and before the first backward(). If no optimizer holds {name}, freeze it "
                    f"before making the engine, or call model.zero_grad()."
                )

    # --- noise

    def shards(self) -> list[SumShard]:
        """Return this rank's sums for the noise."""
        with torch.no_grad():
            self._totals = self._find_totals()
        return [shard for _, shard in self._totals.values()]

    def privatize(self, release_: Callable[[Sequence[SumShard]], Tensor]) -> Tensor:
        """Make the sums private gradients; return their L2 norm [] before noise."""
        local, assign = self._sharding.local, self._sharding.assign
        with torch.no_grad():
            shards = [shard for _, shard in self._totals.values()] or self.shards()
            norm_sq = self._released(shards, release_)
            for name, (total, _) in self._totals.items():
                parameter = self._parameters[name]
                gradient = parameter.grad
                # Any other tensor in `.grad` by now has no noise.
                if gradient is not total and (gradient is None or total is not local(gradient)):
                    assign(parameter, total.to(parameter.dtype))
        self._reset()
        return self._sharding.over_shards(norm_sq).sqrt()

    def _released(self, shards: Sequence[SumShard], release_: Callable[[Sequence[SumShard]], Tensor]) -> Tensor:
        parts = self._sharding.parts
        if parts is None:
            return release_(shards).square()
        cut, same = parts.divide(shards)
        return parts.over_shards(*(release_(some).square().to(parts.device) for some in (cut, same)))

    def _find_totals(self) -> dict[str, tuple[Tensor, SumShard]]:
        """Return this rank's part of each sum, float32 or wider, and its shard; zeros without a gradient.

        Shards of complex sums are real pairs: both parts get independent noise. Frozen parameters without a
        gradient are left out, because an optimizer would move them.
        """
        local, wide_sums, unreduced = self._sharding.local, self.wide_sums, self.unreduced
        found: dict[str, tuple[Tensor, SumShard]] = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            total = gradient if gradient is None or type(gradient) is Tensor else local(gradient)
            if wide_sums or unreduced:
                total = wide_sums.get(name, unreduced.get(name, total))
            if total is None:
                if not parameter.requires_grad:
                    continue
                shard = local(parameter)
                total = torch.zeros(shard.shape, dtype=accum_dtype(shard), device=shard.device)
            if total.dtype not in WIDE:
                total = total.float()
            shape, kept = parameter.shape, self._places.get(name)
            if kept is None or kept[0] != shape:
                kept = self._places[name] = shape, self._sharding.place(name)
            if total.is_complex():
                total = total.resolve_conj()  # noise must not go to a copy of a lazily conjugated `.grad`
                found[name] = total, SumShard(name, as_real(total), *(2 * n for n in kept[1]))
            else:
                found[name] = total, _new(SumShard, (name, total, *kept[1]))
        return found

    def install(self, held: set[Tensor]) -> None:
        """Do nothing: optimizers read `.grad`."""

    def full_gradient(self, name: str) -> Tensor | None:
        """Whole private gradient, if any; all ranks call it, in one order."""
        gradient = self._parameters[name].grad
        return None if gradient is None else self._sharding.unshard(name, gradient)

    # --- start and end

    def drop(self) -> None:
        """Drop all sums and all `.grad`."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._reset()

    def forget(self) -> None:
        """Forget the sums outside `.grad`, and the guard's records."""
        self._totals.clear()
        self.wide_sums.clear()
        self.unreduced.clear()
        self._guard.forget()

    def _reset(self) -> None:
        self.forget()
        self._guard.reset()
        self.passes.reset()


_new = tuple.__new__
"""Makes a NamedTuple without the Python call of its __new__."""


def _references() -> int:
    local = object()
    return sys.getrefcount(local)


_ALONE = _references()
"""References to a local variable; Python versions differ."""


def add(sums: dict[str, Tensor], name: str, x: Tensor) -> None:
    """Add `x` out of place."""
    sums[name] = sums[name] + x if name in sums else x
