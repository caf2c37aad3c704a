"""A small model, its data and an engine, for the tests of the engine."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine

UNWARNED = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]
"""Marks of tests with intentional own loops and missing noise."""

N, D, P = 24, 5, 3
"""Samples, inputs, classes."""
STYLES = ["all-layer", "layer-wise", "block-wise", "param-wise", [["0.weight", "2.bias"], ["2.weight", "0.bias"]]]


def mlp(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, P)).double()


def data(n=N, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator, dtype=torch.float64), torch.arange(n) % P


def engine_on(model, **options):
    defaults = {"batch_size": 6, "sample_size": N, "steps": 8, "noise_multiplier": 0, "clipping_fn": "abadi"}
    engine = PrivacyEngine(model, **{**defaults, **options})
    engine._secret = bytes(range(32))  # the same logical batches in every run
    return engine


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_of(engine, micro_batch_size):
    """Return the first logical batch; the caller must keep the iterator."""
    batches = engine.batches(TensorDataset(*data()), micro_batch_size)
    logical_batch = next(batches)
    logical_batch.batches = batches
    return logical_batch


def backward(model, rows=slice(0, 6)):
    x, y = (t[rows] for t in data())
    F.cross_entropy(model(x), y).backward()
