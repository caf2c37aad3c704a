"""Model and optimizer for a checkpoint: tensors by parameter name, the same in all back-ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dpshard.errors import CheckpointError, ConfigurationError

Groups = list[dict[str, Any]]

OPTIMIZER_STATE = "optimizer.state."
"""Prefix of optimizer state in a checkpoint; the parameter's name and the state's own name follow."""


NAMING = frozenset({"params", "param_names"})
"""Keys that are no settings."""


class Snapshot(NamedTuple):
    """A nested state; its tensors share memory with the training."""

    model: dict[str, Any]
    """Tensors by their names in state_dict()."""
    remembered: dict[str, dict[str, Any]]
    """Optimizer state by parameter; empty before the first step."""
    groups: Groups


class TrainingState(Protocol):
    """Model and optimizer for a checkpoint. All ranks call every method, in one order."""

    def snapshot(self) -> Snapshot:
        """Present state."""
        ...

    def receiving(self, saved: Mapping[str, Any], groups: Groups) -> AbstractContextManager[Snapshot]:
        """Return a context in which a checkpoint, described by name in `saved`, is read into a snapshot.

        The snapshot is installed at the end. If the context raises before, nothing has changed. Raise CheckpointError
        for the state of another optimizer.
        """
        ...


class NamedState:
    """A TrainingState of whole parameters or DTensors."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        self.model, self.optimizer, self.names = model, optimizer, names

    def snapshot(self) -> Snapshot:
        """Present state."""
        self._reshard()
        # get_optimizer_state_dict would take a first step, which Adam would count.
        if not self.optimizer.state:
            return Snapshot(get_model_state_dict(self.model), {}, self._groups())
        return self._stepped()

    @contextmanager
    def receiving(self, saved: Mapping[str, Any], groups: Groups) -> Iterator[Snapshot]:
        """Return a context that reads a checkpoint, and installs it at its end."""
        self._reshard()
        groups = self._fitting(groups)
        untouched = not self.optimizer.state
        stepped = any(name.startswith(OPTIMIZER_STATE) for name in saved)
        try:
            place = self._stepped() if stepped else Snapshot(get_model_state_dict(self.model), {}, [])
            yield place
        except BaseException:
            if untouched:
                self.optimizer.state.clear()
            raise
        set_model_state_dict(self.model, place.model)
        state: dict[str, Any] = {"state": place.remembered, "param_groups": groups}
        if stepped:
            set_optimizer_state_dict(self.model, self.optimizer, state)
        else:
            self.optimizer.load_state_dict(state)

    def _stepped(self) -> Snapshot:
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)
        return Snapshot(get_model_state_dict(self.model), state["state"], state["param_groups"])

    def _groups(self) -> Groups:
        return [group | {"params": [self._name(p) for p in group["params"]]} for group in self.optimizer.param_groups]

    def _fitting(self, saved: Groups) -> Groups:
        """Return own groups with the parameters' saved settings."""
        settings_of = {name: group for group in saved for name in group["params"]}
        found: Groups = []
        for own in self._groups():
            missing = [name for name in own["params"] if name not in settings_of]
            if missing:
                raise CheckpointError(
                    f"{missing[0]} is in no parameter group of the checkpoint, which belongs to another model or "
                    f"optimizer. Resume with the saved ones."
                )
            _refuse_other_optimizer(self.optimizer, settings_of[own["params"][0]] if own["params"] else own)
            settings = own
            for i, name in enumerate(own["params"]):
                if i > 0 and (differs := differing(settings, settings_of[name])):
                    raise CheckpointError(
                        f"{own['params'][0]} and {name} are in one parameter group, but were saved with different "
                        f"{differs[0]}. Make the optimizer with the groups of the saved one."
                    )
                settings = settings_of[name]
            found.append({key: x for key, x in settings.items() if key not in NAMING} | _naming(own))
        return found

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self.names:
            raise ConfigurationError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have, so "
                f"it cannot be saved by name. Give it another optimizer, and save that as a named object."
            )
        return self.names[parameter]

    def _reshard(self) -> None:
        # FSDP2 leaves the root unsharded after a forward without a backward.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two groups differ."""
    both = one.keys() & other.keys()
    return sorted(
        key for key in (one.keys() | other.keys()) - NAMING if key not in both or not same(one[key], other[key])
    )


def _refuse_other_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a group of another optimizer. Flags may be missing: kinds of one optimizer differ."""
    missing = [key for key, x in optimizer.defaults.items() if not isinstance(x, bool | None) and key not in saved]
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {', '.join(sorted(missing))} of {type(optimizer).__name__}: it belongs to another "
            f"optimizer. Resume with the saved one."
        )


def same(a: Any, b: Any) -> bool:
    """Return True for equal values or tensors."""
    tensors = isinstance(a, Tensor), isinstance(b, Tensor)
    return torch.equal(a.cpu(), b.cpu()) if all(tensors) else not any(tensors) and a == b


def _naming(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in NAMING & group.keys()}
