"""The exponential average of weights, against a loop over numbers."""

import pytest
import torch
from torch import nn

from dpshard.errors import CheckpointError, ConfigurationError
from dpshard.recipes import WeightAverage


def model_of(values):
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(values)
    return model


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_is_that_of_its_formula(decay):
    model = model_of(1.0)
    model.bias.requires_grad_(False)
    average, expected = WeightAverage(model, decay), 1.0
    for t in range(20):
        with torch.no_grad():
            model.weight.fill_(t * t)
        average.update()
        kept = min(decay, (1 + t) / (10 + t))
        expected = kept * expected + (1 - kept) * t * t
    with average.applied():
        assert model.weight[0].tolist() == pytest.approx([expected] * 2)
        assert model.bias.item() == 1.0
    assert model.weight[0].tolist() == [19 * 19] * 2


def test_weights_come_back_after_an_error():
    model = model_of(1.0)
    average = WeightAverage(model)
    with torch.no_grad():
        model.weight.fill_(5.0)

    def failing():
        with average.applied():
            assert model.weight[0, 0] == 1.0
            raise ValueError("a score that failed")

    with pytest.raises(ValueError, match="a score"):
        failing()
    assert model.weight[0, 0] == 5.0


def test_a_saved_average_continues():
    one, other = (WeightAverage(model_of(x), 0.5) for x in (1.0, 9.0))
    one.update()
    other.load_state_dict(one.state_dict())
    assert other.state_dict()["updates"] == 1
    assert torch.equal(other.state_dict()["average"]["weight"], one.state_dict()["average"]["weight"])
    with pytest.raises(CheckpointError, match="another model"):
        WeightAverage(nn.Linear(3, 1)).load_state_dict(one.state_dict())


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), "0.9"])
def test_a_decay_is_below_one(decay):
    with pytest.raises(ConfigurationError, match="decay"):
        WeightAverage(nn.Linear(1, 1), decay)


def test_small_changes_of_half_precision_weights_add_up():
    model = model_of(1.0).bfloat16()
    average = WeightAverage(model, 0.9999)
    average._updates = 10**6  # so the decay is 0.9999: a step of 1e-4, below the resolution of bfloat16
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(1000):
        average.update()
    assert average.state_dict()["average"]["weight"][0, 0].item() == pytest.approx(2 - 0.9999**1000, rel=1e-4)
    with average.applied():
        assert model.weight.dtype == torch.bfloat16
    assert model.weight[0, 0] == 2.0


def test_a_foreign_state_is_refused():
    with pytest.raises(CheckpointError, match="another model"):
        WeightAverage(model_of(1.0)).load_state_dict({})
