"""Refuses changes of clipped sums between the anchor and the noise.

[Note: Guarding the gradients] Any code may change a clipped sum in `.grad`. So
- a hook on every parameter accepts only the tensor object that its anchor returned;
- `.grad`, its version, and a checksum of its bits must be unchanged before more gradients or noise are added. The
  version shows writes that change no bit. The checksum shows writes that torch does not count: through `.data`, and by
  torch._foreach_* on shards;
- checksums are compared at the first anchor of the next pass, and before the noise. On an accelerator only the release
  reads the result, because reading would stall. If modules have backward hooks, each anchor compares. A tensor hook's
  write through `.data` within the pass is not detected;
- the store releases the tensors whose bits were digested, whatever lies in `.grad` by then;
- foreign hooks on a parameter, and the loss of an own one, are refused.
Only the incomplete sums of a failed backward pass may be dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpshard.backends.checksums import checksums
from dpshard.errors import LogicalBatchError, UnsupportedParameterError
from dpshard.records.host import is_at_hand


class Guard:
    """Watches the gradients of `parameters`; see [Note: Guarding the gradients].

    `local` returns this rank's part. `accumulated` gets a parameter's name after autograd added to its gradient.
    `hooked`: module hooks run in backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        local: Callable[[Tensor], Tensor],
        accumulated: Callable[[str, object], object] | None,
        training: Callable[[], bool],
        hooked: Callable[[], bool],
    ) -> None:
        self._parameters = parameters
        self._local = local
        self._training = training
        self._hooked = hooked
        self._at_once = False  # foreign code runs in backward
        self._watching = True
        self.other_cause = ""
        """Another possible cause of lost sums, for the error message."""
        # Tensors, not addresses, which another gradient may reuse.
        self._expected: dict[str, Tensor] = {}
        self._noted: dict[str, tuple[Tensor, int, int]] = {}
        """`.grad`, its version, and that of this rank's part."""
        self._sealed: dict[str, _Seal] = {}
        """Checksums by name; none until the backward pass ends."""
        self._unsealed: dict[str, None] = {}  # noted in this backward, without a checksum
        self._sealing = -1
        # A compiled function may call backward; dynamo would trace the callback.
        self._seal_later: Any = torch.compiler.disable(self._seal)
        self._comparisons: list[tuple[list[str], Tensor]] = []  # names, and which changed
        self._handles: list[RemovableHandle] = []
        self._own: dict[str, tuple[int, tuple[int, ...]]] = {}  # numbers of own hooks before and after it adds
        for name, p in parameters.items():
            own = self.watch(name, p)
            self._own[name] = own.id, ()
            if accumulated is not None:
                after = p.register_post_accumulate_grad_hook(functools.partial(accumulated, name))
                self._own[name] = own.id, (after.id,)
                self._handles.append(after)

    # --- during backward

    def watch(self, name: str, tensor: Tensor) -> RemovableHandle:
        """Accept only the expected gradient at `tensor`: the parameter, or its unsharded form."""
        self._handles.append(tensor.register_hook(functools.partial(self._require_expected, name)))
        return self._handles[-1]

    def expect(self, name: str, gradient: Tensor) -> Tensor:
        """Accept only this tensor object as the parameter's next gradient; return it."""
        self._expected[name] = gradient
        return gradient

    def _require_expected(self, name: str, gradient: Tensor | None) -> None:
        if not self._watching or gradient is None:
            return
        if self._expected.pop(name, None) is not gradient:
            if not self._training():
                raise UnsupportedParameterError(
                    f"{name}: a gradient reached it from a forward in eval mode and is not clipped. Call model.train() "
                    f"before the training loop (from_pretrained returns models in eval mode). To train without "
                    f"dropout, set its probability to 0."
                )
            raise UnsupportedParameterError(
                f"{name}: a gradient reached it along a path that dpshard does not see, so it is not clipped. Typical "
                f"causes: (1) A regularisation term on the parameter outside the model's forward; use the optimizer's "
                f"weight_decay. (2) torch.jit.script code, or a custom autograd.Function. (3) chunked_cross_entropy in "
                f"a compiled forward; compile the blocks instead. (4) The parameter is used outside of any module "
                f"call. (5) A forward in eval mode; call model.train()."
            )

    @contextmanager
    def guard_disabled(self) -> Iterator[None]:
        """Return a context that accepts unclipped gradients."""
        before, self._watching = self._watching, False
        try:
            yield
        finally:
            self._watching = before

    # --- between backward and the noise

    def note(self, name: str) -> None:
        """Record the present `.grad`."""
        self.note_all([name])

    def note_all(self, names: Iterable[str]) -> None:
        """Record the present `.grad`."""
        parameters, local = self._parameters, self._local
        noted, unsealed, sealed = self._noted, self._unsealed, self._sealed
        for name in names:
            gradient = parameters[name].grad
            if gradient is not None:
                version = gradient._version
                noted[name] = gradient, version, version if type(gradient) is Tensor else local(gradient)._version
                unsealed[name] = None
                sealed.pop(name, None)
        backward = torch._C._current_graph_task_id()
        if backward == -1 or self._at_once:
            self._seal()
        elif backward != self._sealing:
            self._sealing = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._seal_later)

    def _seal(self) -> None:
        self._sealing = -1
        fresh = [name for name in self._unsealed if name in self._noted]
        self._unsealed.clear()
        if fresh:
            with torch.no_grad():  # otherwise autograd records to_local()
                seal = _Seal(*checksums(self._bits(fresh)))
            self._sealed.update(dict.fromkeys(fresh, seal))

    def _bits(self, names: Iterable[str]) -> dict[str, Tensor]:
        noted, local = self._noted, self._local
        some = {name: noted[name][0] for name in names}
        return {name: x if type(x) is Tensor else local(x) for name, x in some.items()}

    def holds_anything(self, name: str) -> bool:
        """Return True unless this rank's part of `.grad` is zero."""
        gradient = self._parameters[name].grad
        return gradient is not None and bool(self._local(gradient).any())

    def is_untouched(self, name: str) -> bool:
        """Return True if `.grad` is the noted tensor at its noted version."""
        gradient, noted = self._parameters[name].grad, self._noted.get(name)
        if noted is None:
            return gradient is None or not self.holds_anything(name)  # zero_grad(set_to_none=False)
        if gradient is None or gradient is not noted[0] or gradient._version != noted[1]:
            return False
        return type(gradient) is Tensor or self._local(gradient)._version == noted[2]

    def all_thrown_away(self) -> bool:
        """Return True if zero_grad() removed all gradients; zeros alone may be stand-ins."""
        empty = not any(self.holds_anything(name) for name in self._parameters)
        return empty and not all(self.is_untouched(name) for name in self._parameters)

    def require_untouched(self, names: Collection[str]) -> None:
        """Raise LogicalBatchError unless gradients are untouched, UnsupportedParameterError for foreign hooks."""
        parameters, noted, own, odd = self._parameters, self._noted, self._own, []
        for name in names:  # no calls for ordinary gradients: hundreds of anchors run this loop
            parameter, was = parameters[name], noted.get(name)
            gradient = parameter.grad
            same = was is None
            if gradient is not None:
                same = was is not None and gradient is was[0] and gradient._version == was[1]
                same = same and type(gradient) is Tensor
            hooks, after = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
            mine, mine_after = own[name]
            hooked = not hooks or len(hooks) > 1 or mine not in hooks or tuple(after or ()) != mine_after
            if hooked or not same:
                odd.append(name)
        for name in odd:
            self.refuse_hooks(name, parameters[name])
        for name in odd:
            if (name in noted or parameters[name].grad is not None) and not self.is_untouched(name):
                self._refuse(name)
            if name not in noted:  # the noted ones passed, or backward made them
                self._refuse_shared_memory(name)
        if self._at_once:
            self.compare_bits()

    def begin(self) -> None:
        """Begin a backward pass."""
        self._at_once = self._hooked()
        self.compare_bits()

    def compare_bits(self) -> None:
        """Compare all gradients with their checksums; raise LogicalBatchError now, or later if reading would stall."""
        sealed = self._sealed
        for seal in dict.fromkeys(sealed.values()):
            held = [name for name in seal.names if sealed.get(name) is seal]
            names, now_N = checksums(self._bits(held))
            then_N = seal.checksum_N if names == seal.names else seal.checksum_N[[seal.names.index(n) for n in names]]
            self._comparisons.append((names, now_N != then_N))
        if all(is_at_hand(changed_N) for _, changed_N in self._comparisons):
            self.refuse_rewritten()

    def refuse_rewritten(self) -> None:
        """Raise LogicalBatchError if a comparison found changed bits."""
        comparisons, self._comparisons = self._comparisons, []
        changed = [changed_N for _, changed_N in comparisons]
        found = torch.cat(changed).tolist() if changed else []
        if True in found:
            self._refuse([name for names, _ in comparisons for name in names][found.index(True)])

    def _refuse(self, touched: str) -> None:
        if not self.holds_anything(touched):
            raise LogicalBatchError(
                f"The clipped sum of {touched} was thrown away before it was released. Call zero_grad() only after "
                f"optimizer.step(), not between the micro-batches of one logical batch, and not to skip a step. (If an "
                f"optimizer outside torch.optim steps, call engine.privatize() before it: it would read gradients "
                f"without noise.){self.other_cause}"
            )
        raise LogicalBatchError(
            f"The gradient of {touched} was changed between backward() and the noise, so its sensitivity differs from "
            f"the accounted one. To clip, scale, log or set gradients, call engine.privatize() first."
        )

    def _refuse_shared_memory(self, name: str) -> None:
        parameter = self._parameters[name]
        if parameter.grad is None or not parameter.grad.numel():
            return
        memory, of_gradient = (self._local(x.detach()).untyped_storage()._cdata for x in (parameter, parameter.grad))
        if memory == of_gradient:
            raise LogicalBatchError(
                f"The .grad of {name} shares its memory, so sums without noise would be written into the parameter. "
                f"Set {name}.grad = None; backward() makes another."
            )

    def refuse_hooks(self, name: str, parameter: nn.Parameter) -> None:
        """Raise UnsupportedParameterError for a foreign hook, or if an own one is gone."""
        own, own_after = self._own[name]
        hooks, after = parameter._backward_hooks or (), getattr(parameter, "_post_accumulate_grad_hooks", None)
        after = tuple(after) if after else ()
        if own in hooks and len(hooks) == 1 and after == own_after:
            return
        if own not in hooks or not {*own_after} <= {*after}:
            raise UnsupportedParameterError(
                f"{name} has lost the gradient hook of dpshard, which refuses gradients that are not clipped. Remove "
                f"only hooks of your own."
            )
        raise UnsupportedParameterError(
            f"{name} has a gradient hook that is not dpshard's. It would see and change gradients before the noise is "
            f"added. Remove it, and read gradients after engine.privatize(). An optimizer that steps within backward() "
            f"cannot be private."
        )

    # --- start and end

    def forget(self) -> None:
        """Forget all recorded gradients."""
        self._noted.clear()
        self._sealed.clear()
        self._unsealed.clear()
        self._comparisons.clear()

    def reset(self) -> None:
        """Forget all recorded and expected gradients."""
        self.forget()
        self._expected.clear()

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, slots=True, eq=False)
class _Seal:
    names: list[str]
    checksum_N: Tensor
    """int64"""
