"""Verification catches rules, norms and sums that are wrong.

Failure modes: 7 test_a_lost_use_is_caught; 8 test_a_broken_rule_is_caught,
test_a_broken_sum_of_a_large_parameter_is_caught.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.clipping.tape import Tape
from dpshard.errors import VerificationError
from dpshard.records import OuterProduct
from dpshard.rules import RULES
from dpshard.verification.count_sketch import WIDTHS
from tests.verification.models import B, D, Looped, engine_on, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]


@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
def test_a_lost_use_is_caught(monkeypatch, mode):
    arrive, seen = Tape.arrive, []

    def lossy(self, use, tensors):
        seen.append(use.sources[0].label)
        lost = seen.count("layer.weight") % 3 == 2 and seen[-1] == "layer.weight"
        arrive(self, use, [None] * len(tensors) if lost else tensors)

    monkeypatch.setattr(Tape, "arrive", lossy)
    model = Looped()
    engine_on(model, clipping_mode=mode)
    with pytest.raises(VerificationError, match=r"layer\.(weight|bias)"):
        model(normal(B, D))


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
@pytest.mark.parametrize("fault", ["no cross terms", "norm", "sum", "rule"])
def test_a_broken_rule_is_caught(monkeypatch, fault, style):
    if fault == "no cross terms":
        monkeypatch.setattr(
            "dpshard.clipping.group_tape.measure",
            lambda records, *_, **__: (sum(r.norm_sq("ghost") for r in records), records),
        )
    elif fault == "norm":
        norm_sq = OuterProduct.norm_sq
        monkeypatch.setattr(OuterProduct, "norm_sq", lambda self, method: 0.9 * norm_sq(self, method))
    elif fault == "sum":
        clipped_sum = OuterProduct.clipped_sum
        monkeypatch.setattr(OuterProduct, "clipped_sum", lambda self, factor: clipped_sum(self, factor).roll(1, 0))
    else:
        linear = RULES[F.linear]
        monkeypatch.setitem(RULES, F.linear, lambda call, x, w, b: 1.1 * linear(call, x, w, b))
    model = Looped()
    engine_on(model, clipping_style=style, clipping_mode="bk")
    with pytest.raises(VerificationError, match=r"layer|head"):
        model(normal(B, D))


@pytest.mark.parametrize("fault", ["one element", "one row", "one sample"])
def test_a_broken_sum_of_a_large_parameter_is_caught(monkeypatch, fault):
    """Sketches compare gradients of many elements."""
    clipped_sum = OuterProduct.clipped_sum

    def broken(self, factor):
        if fault == "one sample":
            return clipped_sum(self, factor * torch.tensor([1.0, 1.0, 0.99]))
        total = clipped_sum(self, factor).clone()
        spoiled = total[0, :1] if fault == "one element" else total[0]
        spoiled += 0.01 * total.norm() / len(spoiled) ** 0.5
        return total

    model = nn.Linear(90, 100)
    assert model.weight.numel() > 2 * WIDTHS[0]
    engine_on(model)
    x = normal(3, 90)
    model(x)  # as it is, it passes
    monkeypatch.setattr(OuterProduct, "clipped_sum", broken)
    model = nn.Linear(90, 100)
    engine_on(model)
    with pytest.raises(VerificationError, match="weight"):
        model(x)
