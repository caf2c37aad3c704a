"""The kernel of digests against torch's operators: the same bits."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpshard.kernels import triton
from dpshard.kernels.native.digest import WIDTH
from dpshard.kernels.triton.digest import _GROUPS, _MOST, _TILE
from dpshard.noise.digest import SumDigest
from dpshard.noise.keyed import SumShard
from tests.kernels.triton.support import DEVICE, skip_without_kernels

skip_without_kernels()

SECRET = bytes(range(32))
DTYPES = [torch.float32, torch.float64]


def bits(*shape, dtype=torch.float32):
    """Random bits, among them NaN and infinity."""
    words = torch.randint(-(2**31), 2**31, (*shape, dtype.itemsize // 4), dtype=torch.int64, device=DEVICE)
    return words.int().view(dtype)[..., 0]


def require_equal_digests(shards):
    found = []
    for switch in ("1", "0"):
        with (
            mock.patch("dpshard.kernels.native.supports_digest", return_value=False),
            mock.patch.dict("os.environ", {"DPSHARD_TRITON": switch}),
            mock.patch.object(triton, "add_digests_", wraps=triton.add_digests_) as kernel,
        ):
            found.append(SumDigest(SECRET).part(shards).tolist())
        assert kernel.call_count == (1 if switch == "1" else 0)
    assert found[0] == found[1] != [0, 0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(start=st.integers(0, 3 * WIDTH), n=st.integers(1, 3 * WIDTH), dtype=st.sampled_from(DTYPES))
def test_any_place_and_size(start, n, dtype):
    require_equal_digests([SumShard("w", bits(n, dtype=dtype), start)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, 2, _TILE - 1, _TILE, WIDTH - 1, WIDTH, WIDTH + 16, 2**33 + 7])
@pytest.mark.parametrize("n", [1, 2, _TILE, _TILE + 1, WIDTH - 1, WIDTH, WIDTH + 1])
def test_at_the_edges_of_tiles_and_rows(dtype, start, n):
    require_equal_digests([SumShard("w", bits(n, dtype=dtype), start)])


@pytest.mark.parametrize("rows", [2 * _GROUPS + 1, 3 * _GROUPS])
def test_groups_of_rows_and_blocks_of_weights(rows):
    """Some groups have fewer rows; weights come from two keys."""
    require_equal_digests([SumShard("w", bits(rows * WIDTH - 5), 3)])


def test_the_largest_groups():
    narrow, count = _TILE, _GROUPS * _MOST + _MOST // 2 + 1
    words, rows = bits(count * narrow - 9).view(torch.int32), bits(count, 2, dtype=torch.float64).view(torch.int64)
    require_sum(words, 4, bits(2, narrow).view(torch.int32), rows)


@pytest.mark.parametrize("word", [-(2**31), 2**31 - 1, -1])
@pytest.mark.parametrize("row", [-(2**63), 2**63 - 1])
def test_sums_wrap_around(word, row):
    words = torch.full((2 * WIDTH,), word, dtype=torch.int32, device=DEVICE)
    rows = torch.full((2, 2), row, dtype=torch.int64, device=DEVICE)
    require_sum(words, 0, torch.full((2, WIDTH), word, dtype=torch.int32, device=DEVICE), rows)


def require_sum(words, at, columns, rows):
    total = torch.tensor([2**63 - 1, -(2**63)], device=DEVICE)
    version = total._version
    matrix = torch.zeros(len(rows) * columns.shape[1], dtype=torch.int64, device=DEVICE)
    matrix[at : at + len(words)] = words
    expected = total + ((matrix.view(len(rows), 1, -1) * columns).sum(2) * rows).sum(0)
    triton.add_digests_(total, [words], [at], columns, rows)
    assert total.tolist() == expected.tolist()
    assert total._version > version  # torch learns of the write


def test_many_tensors_of_any_strides():
    shards = [SumShard(f"p{i}", bits(i * i, dtype=DTYPES[i % 2]), 5 * i) for i in range(70)]
    shards += [SumShard("columns", bits(40, 30).t(), 7), SumShard("one", bits(2, 2)[:1, 1], 3)]
    shards += [SumShard("part", bits(4100)[3:], 9), SumShard("scalar", bits(1, dtype=torch.float64)[0])]
    require_equal_digests(shards)


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs(dtype):
    require_equal_digests([SumShard("w", bits(5, 40, dtype=dtype), 11, 40, 130)])


def test_fake_tensors_pass():
    total, words = torch.zeros(2, dtype=torch.int64, device=DEVICE), bits(50).view(torch.int32)
    columns, rows = bits(2, WIDTH).view(torch.int32), torch.ones(1, 2, dtype=torch.int64, device=DEVICE)
    arguments = total, [words, words], [3, 0], columns, torch.cat([rows, rows])
    torch.library.opcheck(triton.add_digests_, arguments, test_utils=("test_schema", "test_faketensor"))
