"""Forwards outside the training loop, which leave all state unchanged."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from dpshard.interception.active import ActiveForward
from dpshard.interception.determinism import AS_DRAWN, DeterministicForward, Draws
from dpshard.interception.model_state import ModelState
from dpshard.interception.parameter_writes import WriteGuard
from dpshard.interception.run import Run
from dpshard.randomness import host_states, restore_host


class IsolatedForward:
    """A block of ordinary forwards; at its end, all state is restored."""

    def __init__(self, model: nn.Module, active: ActiveForward, writes: WriteGuard, module: nn.Module) -> None:
        self._model, self._active, self._writes, self._module = model, active, writes, module
        self._stack = ExitStack()

    def __enter__(self) -> IsolatedForward:
        self._on_host = host_states()
        cuda = {p.device for p in self._module.parameters() if p.device.type == "cuda"}
        self._on_cuda = {device: torch.cuda.get_rng_state(device) for device in cuda}
        self.model = ModelState(self._model)
        self._stack.enter_context(eager())
        self._stack.enter_context(self._active.suspended())
        return self

    def guarded(self, forward: Callable[[], Any]) -> Any:
        """Return the result of `forward`, which must not write into parameters."""
        return self._writes.run(forward, self.rewind)

    def run_plain(self, run: Run, samples: list[int], draws: Draws = AS_DRAWN) -> Any:
        """Return the output for `samples` by plain autograd, eager and without dropout."""
        self._active.repeat = functools.partial(DeterministicForward, len(samples) * run.rows_per_unit, draws)
        with eager(), self._active.repeat():
            return run.on(samples)

    def rewind(self, draws: Draws = AS_DRAWN) -> None:
        """Restore the state; `draws` may seed generators."""
        self.model.restore()
        self.rewind_generators(draws)

    def rewind_generators(self, draws: Draws = AS_DRAWN) -> None:
        """Restore only the generators."""
        if draws.seed is None:
            restore_host(self._on_host)
            for device, state in self._on_cuda.items():
                torch.cuda.set_rng_state(state, device)
        else:
            random.seed(draws.seed)
            np.random.seed(draws.numpy_seed)  # noqa: NPY002
            on_cuda = [torch.cuda.default_generators[device.index] for device in self._on_cuda]
            for generator in (torch.default_generator, *on_cuda):
                generator.manual_seed(draws.seed)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self.rewind()


Isolate = Callable[[nn.Module], IsolatedForward]


def eager() -> AbstractContextManager[Any]:
    """Return a block in which compiled modules run uncompiled."""
    return torch.compiler.set_stance("force_eager")
