"""Forwards beside the training, which leave random states and buffers as they were."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpshard.interception.foreign_patches import undo_foreign_patches

if TYPE_CHECKING:
    from dpshard.interception.patching import Interception


class Undisturbed:
    """See Interception.undisturbed."""

    def __init__(self, owner: Interception, module: nn.Module) -> None:
        self.owner, self.module = owner, module

    def __enter__(self) -> Undisturbed:
        undo_foreign_patches()
        devices = {p.device for p in self.module.parameters() if p.device.type == "cuda"}
        self.rng = torch.random.fork_rng(devices=[d.index or 0 for d in devices], device_type="cuda")
        self.rng.__enter__()
        self.python_state, self.torch_state = random.getstate(), torch.random.get_rng_state()
        self.numpy_state = np.random.get_state()  # noqa: NPY002
        self.stance = eager()
        self.stance.__enter__()
        self.saved = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in self.owner.model.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.before = (self.owner.active, self.owner.mode)
        self.owner.active, self.owner.mode = True, None
        return self

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers of the model as they are now, by name."""
        return {name: buffer.detach().clone() for name, buffer in self.owner.model.named_buffers()}

    def rewind(self) -> None:
        """Put buffers and random states back, so that the next forward takes the same course from the same state."""
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)  # noqa: NPY002  # the state that a model's forward may draw from
        torch.random.set_rng_state(self.torch_state)
        with torch.no_grad():
            for owner, name, buffer, value in self.saved:
                owner._buffers[name] = buffer  # it may have been replaced
                buffer.copy_(value)

    def __exit__(self, *error: Any) -> None:
        self.owner.active, self.owner.mode = self.before
        self.rewind()
        self.stance.__exit__(*error)
        self.rng.__exit__(*error)


def eager() -> AbstractContextManager[Any]:
    """A block in which compiled modules run as they were written."""
    return torch.compiler.set_stance("force_eager")
