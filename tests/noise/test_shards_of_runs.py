"""Shards that are runs of elements (columns of a matrix): noise and digest of the global element, as for any shard.

Failure modes: 14 and 15 (noise of the whole sum, independent between parts, equal on copies), on column-wise parts.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpshard.errors import ConfigurationError
from dpshard.noise import keyed
from dpshard.noise.digest import SumDigest
from dpshard.noise.keyed import KeyedDiscreteGaussian, KeyedGaussian, SumShard
from tests.seeds import fix

SECRET = bytes(range(32))
KINDS = {"gaussian": KeyedGaussian(SECRET), "secure": KeyedGaussian(SECRET, secure=True)}
KINDS["grid"] = KeyedDiscreteGaussian(SECRET)


def parts(whole: torch.Tensor, cut: int, below: int) -> list[SumShard]:
    """Four shards: rows above and below, columns left and right."""
    (rows, columns), found = whole.shape, []
    for top, bottom in ((0, below), (below, rows)):
        for left, right in ((0, cut), (cut, columns)):
            part = whole[top:bottom, left:right].contiguous()
            found.append(SumShard("w", part, top * columns + left, right - left, columns))
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from([8, 64, 2**20]))
def test_columns_have_the_noise_of_the_whole(kind: str, cut: int, below: int, block: int) -> None:
    fix("columns")
    whole = torch.randn(7, 10, dtype=torch.float64)
    released = whole.clone()
    with mock.patch.object(keyed, "BLOCK", block), mock.patch.object(keyed, "HEAD", min(block, 8)):
        norm = KINDS[kind].release_([SumShard("w", released)], step=2, std=0.5, divisor=3.0)
        shards = parts(whole, cut, below)
        norms = [KINDS[kind].release_([shard], step=2, std=0.5, divisor=3.0) for shard in shards]
    for shard, expected in zip(shards, parts(released, cut, below), strict=True):
        assert torch.equal(shard.local, expected.local)
    assert torch.stack(norms).norm() == pytest.approx(float(norm), rel=1e-12)


@given(st.integers(1, 9), st.integers(1, 6))
def test_parts_have_the_digest_of_the_whole(cut: int, below: int) -> None:
    fix("digest")
    whole, digest = torch.randn(7, 10), SumDigest(SECRET)
    assert torch.equal(digest.part(parts(whole, cut, below)), digest.part([SumShard("w", whole)]))


def test_runs_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="without overlap"):
        KINDS["gaussian"].release_([SumShard("w", torch.zeros(6), 0, 3, 2)], step=0, std=1.0)
