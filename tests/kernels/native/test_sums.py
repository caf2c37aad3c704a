"""Compiled sums over many tensors: one number for each, the same with any number of threads."""

import pytest
import torch

from dpshard.kernels import native


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 7, 8, 1000, 70_001)
    dtypes = (torch.float32, torch.float64)
    return [torch.randn(n, generator=generator, dtype=dtype) for dtype in dtypes for n in sizes]


def words_of(x):
    size = 2 if x.itemsize == 2 else 4
    raw = bytes(x.view(torch.uint8).tolist())
    return [int.from_bytes(raw[at : at + size], "little", signed=True) for at in range(0, len(raw), size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_checksum_is_the_sum_of_words_and_their_squares(dtype):
    given = [(100 * x[:3000]).to(dtype) for x in tensors()]
    expected = [sum(w + w * w for w in words_of(x)) % 2**64 for x in given]
    assert [found % 2**64 for found in native.checksums(given).tolist()] == expected


def test_norms_are_those_of_torch():
    expected = torch.stack([x.double().square().sum() for x in tensors()])
    torch.testing.assert_close(native.norms_sq(tensors()), expected, rtol=1e-13, atol=0)


def test_threads_change_no_bit(set_threads):
    found = []
    for threads in (1, 4):
        set_threads(threads)
        found.append((native.norms_sq(tensors()).tolist(), native.checksums(tensors()).tolist()))
    assert found[0] == found[1]


def test_other_dtypes_and_layouts_are_refused():
    assert native.supports_sums([torch.zeros(3), torch.zeros(())])
    assert not native.supports_sums([torch.zeros(3), torch.zeros(3, 3).t()])
    assert not native.supports_sums([torch.zeros(3, device="meta")])
    with pytest.raises(ValueError, match="float32 and float64"):
        native.norms_sq([torch.zeros(3, dtype=torch.int32)])
    with pytest.raises(ValueError, match="single bytes"):
        native.checksums([torch.zeros(3, dtype=torch.uint8)])
