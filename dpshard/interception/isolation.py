"""Forwards beside the training, which leave generators and the model's state as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dpshard.interception.determinism import AS_DRAWN, Draws
from dpshard.interception.model_state import ModelState
from dpshard.interception.parameter_writes import ParameterWrites

if TYPE_CHECKING:
    from dpshard.interception.patching import Interception


class IsolatedForward:
    """See Interception.undisturbed."""

    def __init__(self, owner: Interception, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self._stack = ExitStack()

    def __enter__(self) -> IsolatedForward:
        self._generators: dict[torch.device | None, torch.Tensor] = {None: torch.random.get_rng_state()}
        for device in {p.device for p in self.module.parameters() if p.device.type == "cuda"}:
            self._generators[device] = torch.cuda.get_rng_state(device)
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # the state that a model's forward may draw from
        self.model = ModelState(self.owner.model)
        self._before = (self.owner.active, self.owner.mode, self.owner._again)
        self._stack.enter_context(eager())
        self.owner.active, self.owner.mode = True, None
        return self

    def guarded(self, forward: Callable[[], Any]) -> Any:
        """What `forward` returns; UnsupportedParameterError before it writes into a parameter."""
        if not self.owner.scripted:
            try:
                with ParameterWrites(self.owner.model):
                    return forward()
            except RuntimeError as error:
                if "TorchScript" not in str(error):
                    raise
                self.owner.scripted = True  # its interpreter does not run under a mode
                self.rewind()
        return forward()

    def rewind(self, draws: Draws = AS_DRAWN) -> None:
        """Put the state back, so that the next forward takes the same course; `draws` may seed the generators."""
        self.model.restore()
        self.rewind_generators(draws)

    def rewind_generators(self, draws: Draws = AS_DRAWN) -> None:
        """Put the generators back, and leave the model's state as it is."""
        if draws.seed is None:
            random.setstate(self._python)
            np.random.set_state(self._numpy)  # noqa: NPY002
            for device, state in self._generators.items():
                torch.random.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
        else:
            random.seed(draws.seed)
            np.random.seed(draws.numpy_seed)  # noqa: NPY002
            for device in self._generators:
                generator = torch.default_generator if device is None else torch.cuda.default_generators[device.index]
                generator.manual_seed(draws.seed)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self.owner.active, self.owner.mode, self.owner._again = self._before
        self.rewind()


def eager() -> AbstractContextManager[Any]:
    """A block in which compiled modules run as they were written."""
    return torch.compiler.set_stance("force_eager")
