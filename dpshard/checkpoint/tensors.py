"""Model and optimizer as tensors by parameter name, whole or sharded as they are, for any number of ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dpshard.checkpoint.storage import State, pack, unpack


def saved_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Parameters, buffers, and what the optimizer remembers."""
    _reshard(model)
    # get_optimizer_state_dict takes a step with gradients of zero if there was none yet: Adam would count it, and SGD
    # with weight decay would begin with a momentum.
    state = get_optimizer_state_dict(model, optimizer) if optimizer.state else optimizer.state_dict()
    return {"model": get_model_state_dict(model), "optimizer": _packed(state)}


def place_for(model: nn.Module, optimizer: Optimizer, *, stepped: bool) -> State:
    """The tensors to read into; `stepped` tells whether the saved optimizer had anything to remember."""
    _reshard(model)
    state = get_optimizer_state_dict(model, optimizer) if stepped else {"state": {}, "param_groups": []}
    return {"model": get_model_state_dict(model), "optimizer": _packed(state)}


def load(model: nn.Module, optimizer: Optimizer, state: State, *, stepped: bool) -> None:
    """Take over what was read."""
    remembered = state["optimizer"] | {"param_groups": unpack(state["optimizer"]["param_groups"])}
    set_model_state_dict(model, state["model"])
    if stepped:
        set_optimizer_state_dict(model, optimizer, remembered)
    else:
        optimizer.load_state_dict({"state": {}, **remembered})


def _reshard(model: nn.Module) -> None:
    # After a forward without a backward, an evaluation, FSDP2 leaves the parameters of the root unit whole.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _packed(state: Any) -> State:
    return {"state": state["state"], "param_groups": pack(state["param_groups"])}
