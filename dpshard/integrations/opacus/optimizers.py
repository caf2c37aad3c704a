"""The optimizer that `make_private` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpshard.engine import PrivacyEngine
from dpshard.integrations.opacus.progress import Progress


class DPOptimizer(Optimizer):
    """The user's optimizer; it steps once per logical batch, on private gradients.

    It shares groups and state with `original_optimizer`: schedulers may hold either.
    """

    def __init__(self, optimizer: Optimizer, engine: PrivacyEngine, progress: Progress, *, sums: bool) -> None:
        # Optimizer.__init__ would register the original's parameters again.
        self.original_optimizer = optimizer
        self.engine = engine
        self._progress = progress
        self._sums = sums
        self._step_hook: Callable[[DPOptimizer], None] | None = None
        self._share()

    def _share(self) -> None:
        self.param_groups = self.original_optimizer.param_groups
        self.state = self.original_optimizer.state
        self.defaults = self.original_optimizer.defaults

    @property
    def params(self) -> list[Tensor]:
        """Parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over the sensitivity."""
        return self.engine.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """L2 clipping norm of a sample."""
        return self.engine.mechanism.max_grad_norm

    @property
    def expected_batch_size(self) -> int:
        """Divisor of the noisy sum, over all ranks."""
        return self.engine.mechanism.schedule[0]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call `fn(optimizer)` after the noise, before each step."""
        self._step_hook = fn

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the logical batch is complete."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if self._progress.unfinished:
            self._progress.skip()
            return value
        released = self.engine.step
        self.engine.privatize()
        if self.engine.step > released:
            if self._sums:
                # Opacus does not divide the sum of a sum loss. A public factor after the noise is free.
                gradients = [p.grad for p in self.params if p.grad is not None]
                torch._foreach_mul_(gradients, float(self.expected_batch_size))
            if self._step_hook is not None:
                self._step_hook(self)
        self.original_optimizer.step()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, except clipped sums of an unfinished logical batch."""
        if not self._progress.collecting:
            self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the original optimizer's state."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the original optimizer's state."""
        self.original_optimizer.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the original optimizer."""
        self.original_optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"
