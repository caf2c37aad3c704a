"""The digest of sums: the same whoever holds what, on whatever device; another for any other bits.

A false alarm is a collision, of probability below 2^-54 under a random secret; the secret here is fixed.
"""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpshard.errors import ConfigurationError
from dpshard.noise.digest import SumDigest
from dpshard.noise.keyed import SumShard

SECRET = bytes(range(32))
DIGEST = SumDigest(SECRET)
N = 3 * 4096 * 256 + 1000
"""Number of elements in several blocks of rows."""
WEIGHT = torch.randn(N, generator=torch.Generator().manual_seed(0))


def digest(*shards):
    return DIGEST.part([SumShard(name, x, start) for name, x, start in shards]).tolist()


def by_torch():
    return mock.patch("dpshard.kernels.native.supports_digest", return_value=False)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, N), max_size=4))
def test_shards_add_up(cuts):
    bounds = [0, *sorted(cuts), N]
    parts = [DIGEST.part([SumShard("w", WEIGHT[a:b], a)]) for a, b in itertools.pairwise(bounds)]
    assert torch.stack(parts).sum(0).tolist() == digest(("w", WEIGHT, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (4090, 4100), (4096, 8192), (100, 2_500_000)])
def test_torch_and_compiled_code_agree(dtype, start, stop):
    shards = [("w", WEIGHT[start:stop].to(dtype), start), ("b", WEIGHT[:7].to(dtype), 0)]
    expected = digest(*shards)
    with by_torch():
        assert digest(*shards) == expected


def other_bits(dtype):
    one = WEIGHT[:10_000].to(dtype)
    for change in (
        lambda x: x[17].mul_(-1),
        lambda x: x[17:4000].neg_(),  # signs alone
        lambda x: x.mul_(2),  # exponents alone
        lambda x: x[3:5].copy_(x[3:5].flip(0)),
        lambda x: x.copy_(x.roll(1)),
        lambda x: x[9_999].copy_(torch.nextafter(x[9_999], torch.tensor(9.0, dtype=dtype))),
        lambda x: x[5].fill_(float("nan")),
    ):
        other = one.clone()
        change(other)
        yield one, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_bits_have_another_digest(dtype):
    for one, other in other_bits(dtype):
        found, expected = digest(("w", other, 0)), digest(("w", one, 0))
        assert found[0] != expected[0]
        assert found[1] != expected[1]


def test_name_place_and_secret_matter():
    x = WEIGHT[:100]
    found = [digest(("w", x, 0)), digest(("v", x, 0)), digest(("w", x, 1)), digest(("w", x, 4096))]
    found.append(SumDigest(bytes(32)).part([SumShard("w", x)]).tolist())
    assert len({tuple(pair) for pair in found}) == 5
    assert len({lane for pair in found for lane in pair}) == 10  # lanes are independent


def test_nothing_and_zeros_have_the_digest_zero():
    assert digest() == digest(("w", torch.zeros(0), 0)) == digest(("w", torch.zeros(5), 3)) == [0, 0]


def test_shards_of_any_strides_are_read_row_by_row():
    dense = WEIGHT[:30].view(5, 6)
    strided = torch.empty(6, 5).T.copy_(dense)
    assert digest(("w", strided, 7)) == digest(("w", dense, 7))


def test_one_element_of_any_stride_is_read():
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2, 2, dtype=dtype)
        assert digest(("w", x[:1, 1], 3)) == digest(("w", x[:1, 1].clone(), 3))
        assert digest(("w", x.t()[1, :1], 3)) == digest(("w", x[:1, 1].clone(), 3))
        column = torch.zeros(2, 2, dtype=dtype)[:, 0][:1]
        assert digest(("w", column, 0)) == [0, 0]


def test_many_small_parameters_are_digested_together():
    shards = [(f"p{i}", WEIGHT[i : 2 * i], 0) for i in range(1, 700)]
    expected = digest(*shards)
    with by_torch():
        assert digest(*shards) == expected


def test_half_precision_is_refused():
    with pytest.raises(ConfigurationError, match="Accumulate the clipped sum in float32"):
        digest(("w", torch.zeros(3, dtype=torch.bfloat16), 0))
