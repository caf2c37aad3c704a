"""All attributes of a model are looked through, whatever the others hold."""

import torch
from torch import nn

from dpshard.interception import walk


def test_a_large_attribute_hides_no_later_one():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].many = [[i] for i in range(120_000)]
    model[0].later = model[1].later = {"state": torch.zeros(1)}
    model[1].own = {"state": torch.zeros(1)}
    found = dict(walk(model))
    assert found["0.later[state]"] is model[0].later["state"]
    assert found["1.own[state]"] is model[1].own["state"]
    assert len(found) < 2 * 120_000  # one attribute has its limit
