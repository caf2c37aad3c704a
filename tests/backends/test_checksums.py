"""Checksums of many gradients at once: each tells its own tensor only, and every bit of it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dpshard.backends import checksums as module
from dpshard.backends.checksums import checksums


def gradients():
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    shapes = ((5,), (), (3, 4), (0,), (64, 65), (200, 100))
    made = {
        f"{dtype} {shape}": torch.randn(shape, generator=generator, dtype=dtype) for dtype in dtypes for shape in shapes
    }
    return {**made, "strided": torch.randn(8, 9, generator=generator).t()[1:]}


def by_name(tensors):
    names, values = checksums(tensors)
    return dict(zip(names, values.tolist(), strict=True))


@pytest.mark.parametrize("together", [2**20, 100])
def test_a_change_of_one_gradient_is_seen_there_and_nowhere_else(together, monkeypatch):
    monkeypatch.setattr(module, "_TOGETHER", together)
    tensors = gradients()
    before = by_name(tensors)
    assert before.keys() == tensors.keys()
    assert by_name({name: x.clone() for name, x in tensors.items()}) == before
    assert {name: value for name, x in tensors.items() for value in by_name({name: x}).values()} == before
    for name, x in tensors.items():
        if x.numel():
            for changed in (x * 2, -x, x.where(torch.arange(x.numel()).view(x.shape) > 0, 1e-3)):
                now = by_name({**tensors, name: changed})
                assert [other for other in now if now[other] != before[other]] == [name]


def test_the_signs_of_as_many_positive_as_negative_numbers_count():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    assert by_name({"x": x, "y": x}) != by_name({"x": -x, "y": x})


def test_a_fake_run_leaves_nothing_that_a_real_one_meets():
    tensors = {"x": torch.arange(7.0), "y": torch.arange(9.0)}
    with FakeTensorMode() as mode:
        checksums({name: mode.from_tensor(x) for name, x in tensors.items()})
    expected = by_name(tensors)
    with FakeTensorMode() as mode:
        checksums({name: mode.from_tensor(x) for name, x in tensors.items()})
    assert by_name(tensors) == expected
