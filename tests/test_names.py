"""Walks through modules list what those of nn.Module list, in the same order, in one call."""

import pytest
import torch
from torch import nn

from dpshard.names import KeptWalk, modules_of, parameters_of


class Shared(nn.Module):
    """Modules and parameters that come twice, and empty places for both."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.first_again, self.nothing = self.first, None
        self.register_module("no_module", None)
        self.again[0].weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_parameter("no_parameter", None)


def test_walks_are_those_of_torch():
    for model in (Shared(), nn.Sequential(Shared(), nn.MultiheadAttention(4, 2)), nn.Linear(2, 2, bias=False)):
        assert modules_of(model) == [*model.named_modules()]
        found, expected = parameters_of(model), [*model.named_parameters()]
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(p is q for (_, p), (_, q) in zip(found, expected, strict=True))


def rename(model):
    model.second = model._parameters.pop("scale")


def move_to_the_next(model):
    """All names and parameters are in the same order as before."""
    model.again[0]._parameters = {"weight": model.again[0]._parameters.pop("weight")}


def replace_the_dict(model):
    model.first._parameters = dict(model.first._parameters, bias=nn.Parameter(torch.ones(3)))


CHANGES = {
    "nothing": lambda model: None,
    "other values": lambda model: model.scale.data.fill_(2),
    "frozen": lambda model: model.scale.requires_grad_(False),
    "a new module": lambda model: model.again.append(nn.Linear(3, 3)),
    "another module": lambda model: setattr(model.again, "1", nn.LayerNorm(3)),
    "no module": lambda model: setattr(model, "first_again", None),
    "another parameter": lambda model: setattr(model.again[0], "bias", nn.Parameter(torch.ones(3))),
    "no parameter": lambda model: setattr(model.again[0], "bias", None),
    "another name": rename,
    "a module fewer": lambda model: model.__delattr__("again"),
    "another dict": replace_the_dict,
    "fewer in another dict": move_to_the_next,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_walk_notices_changes(change):
    """It must: a parameter that came later would not be clipped."""
    model = Shared()
    walk = KeptWalk(model)
    assert walk.renew()
    assert not walk.renew()
    CHANGES[change](model)
    assert walk.renew() == (change not in ("nothing", "other values", "frozen"))
    assert walk.modules == [*model.modules()]
    found, expected = walk.parameters, [*model.named_parameters()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(p is q for (_, p), (_, q) in zip(found, expected, strict=True))
