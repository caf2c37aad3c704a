"""Costs that a plain forward must not have, in calls of Python functions, which do not depend on the machine's load."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import dpshard
from dpshard import PrivacyEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

HOME = Path(dpshard.__file__).parent
B = 8


def calls_of(run, *args):
    """Return the calls of dpshard's Python functions by `run(*args)`, by file below the package."""
    found = Counter()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(HOME):
            found[path.relative_to(HOME).as_posix()] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run(*args)
    finally:
        sys.setprofile(before)
    return found


def steady_calls(model):
    """Return those of a forward with a known kind of input: the first one probes the model."""
    PrivacyEngine(model, batch_size=B, sample_size=100, steps=1, noise_multiplier=0.0, verify=False)
    x = torch.randn(B, 6)
    model(x)
    return calls_of(model, x)


def in_rooms(calls, *rooms):
    return sum(n for path, n in calls.items() if path.startswith(tuple(f"{room}/" for room in rooms)))


class Picking(nn.Sequential):
    """The same layers on rows that the data picks."""

    def forward(self, x):
        return super().forward(x[x.sum(1).argsort()])


def mlp(kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_a_plain_forward_makes_few_calls():
    calls = steady_calls(mlp())
    total = in_rooms(calls, "interception", "rules", "clipping")
    assert 0 < total <= 103, calls


def test_a_plain_forward_pays_nothing_for_rows_that_the_data_picks():
    rare = ("interception/routing.py", "interception/routed_calls.py", "rules/routed.py")
    plain, picking = steady_calls(mlp()), steady_calls(mlp(Picking))
    assert not any(plain[path] for path in rare), plain
    assert picking["interception/routing.py"] > 0  # the counter sees such calls


def test_a_plain_forward_pays_nothing_for_derived_parameters_and_vmap():
    calls = steady_calls(mlp())
    assert not any(calls[path] for path in ("rules/derived.py", "rules/parameter_views.py", "rules/vectorized.py"))
    assert calls["interception/vmapped.py"] <= 1, calls  # the inputs are refused within a transform


def test_another_layer_costs_the_same_again():
    one, two, three = (
        in_rooms(steady_calls(nn.Sequential(*(nn.Linear(6, 6) for _ in range(n)))), "interception", "rules", "clipping")
        for n in (1, 2, 3)
    )
    assert three - two == two - one <= 19
