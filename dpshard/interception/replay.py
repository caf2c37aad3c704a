"""Forwards on chosen samples, for verification."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpshard.clipping.tape import Tape
from dpshard.errors import BatchLayoutError
from dpshard.interception.active import ActiveForward
from dpshard.interception.determinism import AS_DRAWN, DeterministicForward, Draws
from dpshard.interception.isolation import Isolate, IsolatedForward, eager
from dpshard.interception.layouts import ATTEMPTS, NEW_COURSE, Layouts
from dpshard.interception.mode import UnknownCall
from dpshard.interception.parameters import TrainedParameters
from dpshard.interception.run import Run


class Replay:
    """Repeats calls of one model."""

    def __init__(
        self, parameters: TrainedParameters, layouts: Layouts, active: ActiveForward, isolate: Isolate
    ) -> None:
        self.parameters, self.layouts = parameters, layouts
        self.isolate = isolate
        self._active = active

    def arguments(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that forward gets, as FSDP casts inputs.

        Calls `module` once, so that FSDP finds its root.
        """
        if not self.parameters.unshards(module):
            return args, kwargs
        seen: list[tuple[Any, Any]] = []
        hook = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        try:
            with self.isolate(module) as state, torch.no_grad():
                state.guarded(functools.partial(module, *args, **kwargs))
        finally:
            hook.remove()
        return seen[0]

    def recorded(
        self, run: Run, samples: list[int], tape: Callable[[], Tape], state: IsolatedForward, draws: Draws = AS_DRAWN
    ) -> Any:
        """Return the output for `samples`, recorded on a tape, eager and without dropout."""
        layout = self.layouts.of(run)
        for _ in range(ATTEMPTS):
            state.rewind(draws)
            mode = self.layouts.mode(run, layout, tape())
            mode.plans = mode.trained = None
            try:
                undropped = functools.partial(DeterministicForward, len(samples) * run.rows_per_unit, draws)
                with eager(), undropped(), self._active.recorded(mode, repeat_in=undropped()):
                    return run.on(samples)
            except UnknownCall:
                state.rewind(draws)
                self.layouts.probe(run.beginning_with([samples[i] for i in mode.suspects(2)]), into=layout)
        raise BatchLayoutError(NEW_COURSE)
