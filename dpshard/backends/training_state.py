"""What a checkpoint holds of model and optimizer: tensors by parameter name, whole or sharded, for any number of ranks.

Every back-end names and shapes them alike, so what one has saved another takes over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dpshard.errors import ConfigurationError

Groups = list[dict[str, Any]]
"""The parameter groups of an optimizer, with names in the place of parameters."""

OPTIMIZER_STATE = "optimizer.state."
"""How the names of what an optimizer remembers begin in a checkpoint: then follow the parameter's, and its own."""


class Snapshot(NamedTuple):
    """The leaves are tensors, whole or sharded, that share memory with the training; and plain values."""

    model: dict[str, Any]
    """Parameters and buffers, by the names of the model's state_dict()."""
    remembered: dict[str, dict[str, Any]]
    """What the optimizer remembers of each parameter; empty before the first step."""
    groups: Groups


class TrainingState(Protocol):
    """Model and optimizer, as a checkpoint sees them. All ranks call every method, in one order."""

    def snapshot(self) -> Snapshot:
        """Return the state as it is."""
        ...

    def receiving(self, saved: Mapping[str, Any], groups: Groups) -> AbstractContextManager[Snapshot]:
        """Read a checkpoint, in a block, into the tensors of a snapshot, which is taken over at its end.

        `saved` describes what the checkpoint holds, by name. If the block raises before it has changed a tensor,
        nothing has changed. Raises CheckpointError for what belongs to another optimizer.
        """
        ...


class NamedState:
    """A TrainingState of whole parameters, or DTensors, that a torch optimizer holds."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        self.model, self.optimizer, self.names = model, optimizer, names

    def snapshot(self) -> Snapshot:
        """See TrainingState."""
        self._reshard()
        # get_optimizer_state_dict takes a step with gradients of zero if there was none yet: Adam would count it, and
        # SGD with weight decay would begin with a momentum.
        if not self.optimizer.state:
            return Snapshot(get_model_state_dict(self.model), {}, self._groups())
        return self._stepped()

    @contextmanager
    def receiving(self, saved: Mapping[str, Any], groups: Groups) -> Iterator[Snapshot]:
        """See TrainingState."""
        self._reshard()
        untouched = not self.optimizer.state
        stepped = any(name.startswith(OPTIMIZER_STATE) for name in saved)
        try:
            place = self._stepped() if stepped else Snapshot(get_model_state_dict(self.model), {}, [])
            yield place
        except BaseException:
            if untouched:
                self.optimizer.state.clear()  # the place for a saved state looks like one
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

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self.names:
            raise ConfigurationError(
                f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, so it has "
                f"no name to be saved by. Give it an optimizer of its own, and save that among the named objects."
            )
        return self.names[parameter]

    def _reshard(self) -> None:
        # After a forward without a backward, an evaluation, FSDP2 leaves the parameters of the root unit whole.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
