"""The oracle itself: an honest loop is exact, and known faults move it beyond R."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.attacks.oracle import ALLOWED, clipped_sum, influence


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(10 * torch.randn(7, 3, generator=generator), torch.tensor([0, 1, 0, 1, 1, 0, 1]))


def honest(model, engine, optimizer, dataset):
    for logical_batch in engine.batches(dataset, micro_batch_size=4):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_an_honest_loop_moves_by_at_most_r():
    assert 0.5 < influence(build, honest, dataset()) <= ALLOWED


def test_the_sum_is_that_of_clipped_gradients_one_by_one():
    data = dataset()
    found = clipped_sum(build, honest, data)
    torch.manual_seed(0)
    model = build()
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for i in range(len(data)):
        x, y = data[i : i + 1]
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for name, g in zip(expected, gradients, strict=True):
            expected[name] += (g * (1 / norm).clamp(max=1)).double()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-5)


def test_a_sample_without_clipping_is_seen():
    def leaky(model, engine, optimizer, dataset):
        honest(model, engine, optimizer, dataset)
        with torch.no_grad():
            model[0].weight.sub_(dataset[0][0])

    assert influence(build, leaky, dataset()) > 1.5
