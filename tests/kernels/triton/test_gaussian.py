"""The kernel of noise against its definition in philox.py."""

from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from dpshard.kernels import triton
from dpshard.kernels.philox import standard_normals
from dpshard.noise.keyed import BLOCK, KeyedGaussian, SumShard
from tests.kernels.triton.support import DEVICE, skip_without_kernels

skip_without_kernels()

SECRET = bytes(range(32))


def drawn(stream, number, start, n):
    """The normals of block `number` that meet elements [start, start + n)."""
    return standard_normals(
        stream, max(start - number * BLOCK, 0), min(start + n - number * BLOCK, BLOCK), device=DEVICE
    )


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.5, -0.125]])
@pytest.mark.parametrize(
    ("start", "n"),
    [(0, 1), (0, 1024), (1, 1023), (511, 2), (5, 3000), (BLOCK - 1500, 4000), (2**33 + 7, 1500), (BLOCK, 1)],
)
def test_the_kernel_draws_what_is_defined(start, n, weights):
    x = torch.randn(n, device=DEVICE)
    rest = torch.randn(3, device=DEVICE)
    first, last = start // BLOCK, (start + n - 1) // BLOCK
    streams = [
        [[(-1) ** i * (2**62 + 12345678912345 * (n + i) + v) for i in range(3)] for n in range(first, last + 1)]
        for v in range(len(weights))
    ]
    noise = sum(
        weight * torch.cat([drawn(stream, number, start, n) for number, stream in enumerate(of_blocks, first)])
        for weight, of_blocks in zip(weights, streams, strict=True)
    )
    expected, norm_sq = (x + 0.3 * noise) / 7.0, x.double().square().sum()
    of_noise = torch.tensor(streams, device=DEVICE), torch.tensor(weights, device=DEVICE)
    norm_sq, version = norm_sq + rest.double().square().sum(), x._version
    found = triton.release_([rest, x], [0, start], [0, 0], *of_noise, BLOCK, 0.3, 7.0)
    assert x._version > version  # torch learns of the write
    assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert_close(found, norm_sq, rtol=1e-6, atol=0.0)


def test_a_release_is_the_same_with_and_without_the_kernel():
    gaussian = KeyedGaussian(SECRET)
    sizes = [3, 0, 40_000, 7]
    results = []
    with mock.patch.object(KeyedGaussian, "_draws_on_cpu", return_value=False):
        for switch in ("1", "0"):
            shards = [SumShard(f"w{i}", torch.full((n,), 2.0, device=DEVICE), start=i) for i, n in enumerate(sizes)]
            strided = torch.full((9, 4), 2.0, device=DEVICE)[:, ::2]
            shards += [SumShard("strided", strided), SumShard("wide", torch.full((9,), 2.0, device=DEVICE).double())]
            with (
                mock.patch.dict("os.environ", {"DPSHARD_TRITON": switch}),
                mock.patch.object(triton, "release_", wraps=triton.release_) as kernel,
            ):
                norm = gaussian.release_(shards, step=4, std=0.5, divisor=8.0)
            assert kernel.call_count == (1 if switch == "1" else 0)
            results.append([norm, *(shard.local for shard in shards)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert float(results[0][0]) == pytest.approx(2 * (sum(sizes) + 18 + 9) ** 0.5)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_a_default_dtype_changes_no_noise(default):
    def released():
        x = torch.zeros(3000, dtype=torch.float32, device=DEVICE)
        with mock.patch.object(KeyedGaussian, "_draws_on_cpu", return_value=False):
            KeyedGaussian(SECRET).release_([SumShard("w", x)], step=4, std=0.5)
        return x

    expected, before = released(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(released(), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "x",
    [torch.ones(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.float64), torch.ones(8, 16)[:, ::2]],
    ids=["bfloat16", "float64", "strided"],
)
def test_a_tensor_that_the_kernel_would_misread_is_refused(x):
    """The kernel has addresses only: it would leave elements without noise, or write beyond the tensor."""
    x, streams = x.to(DEVICE), torch.ones(1, 1, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match="contiguous tensors of"):
        triton.release_([x], [0], [0], streams, torch.ones(1, device=DEVICE), BLOCK, 0.3, 7.0)
    assert bool((x == 1).all())
