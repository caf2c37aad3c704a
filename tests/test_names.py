"""Walks through modules list what those of nn.Module list, in the same order, in one call."""

import torch
from torch import nn

from dpshard.names import modules_of, parameters_of


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
