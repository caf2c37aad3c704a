"""The canary is aimed so that clipping leaves most of it; the optimum has a closed form."""

import math

import pytest
import torch

from dpshard.applications.audit.canary import CanaryGradient
from dpshard.clipping.functions import parse_clipping_fn

GRADIENT = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([[0.5]]).double(), "c": torch.zeros(2).double()}
GROUPS = (("a",), ("b",), ("c",))


def aim(clipping_fn, groups, thresholds):
    odd = CanaryGradient(GRADIENT, groups, parse_clipping_fn(clipping_fn))
    return odd, odd.aim(thresholds)


def test_a_long_gradient_is_left_as_it_is():
    odd, found = aim("abadi", (("a", "b"),), (1.0,))
    assert found.pull == 1
    assert found.length == pytest.approx(1)
    assert odd.along(GRADIENT.get) == pytest.approx([5, 0.5])
    assert math.hypot(*odd.lengths(found)) == pytest.approx(found.length)
    left = odd.left_of(found)
    assert math.hypot(*(float(part.norm()) for part in left.values())) == pytest.approx(1)
    assert odd.along(left.get) == pytest.approx(odd.lengths(found))


def test_every_group_is_filled_to_its_threshold():
    odd, found = aim("abadi", GROUPS, (1.0, 2.0, 3.0))
    assert found.pull == pytest.approx(1e3 / 5)
    assert found.lengths_M.tolist() == pytest.approx([1, 2, 0])
    assert odd.along({"a": GRADIENT["a"], "b": GRADIENT["b"]}.get) == pytest.approx([5, 0.5])
    assert odd.lengths(found) == pytest.approx([1, 2])


def test_clipping_that_drops_what_is_long_is_met_just_below_its_threshold():
    _, found = aim("global", (("a", "b"),), (2.0,))
    assert found.pull * math.hypot(5, 0.5) == pytest.approx(0.99 * 2)
    assert found.length == pytest.approx(0.99 * 2)
    # If one pull cannot fill two groups, choose the one that moves the release more; the other adds what it can.
    _, found = aim("global", GROUPS, (1.0, 1.0, 1.0))
    assert found.pull == pytest.approx(0.99 / 5)
    assert found.lengths_M.tolist() == pytest.approx([0.99, 0.099, 0])


def test_it_is_aimed_anew_when_thresholds_move():
    odd, found = aim("abadi", (("a", "b"),), (1.0,))
    assert odd.aim((1.0,)) is found
    assert odd.aim((0.5,)).length == pytest.approx(0.5)
