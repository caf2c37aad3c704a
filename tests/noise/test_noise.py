"""Keyed Gaussian noise.

Failure modes: 10 test_half_precision_is_refused, test_float64_noise_has_float64_bits;
14 test_standard_deviation_on_any_number_of_ranks; 15 test_noise_does_not_depend_on_the_split,
test_different_purposes_are_independent, test_a_rank_draws_only_the_blocks_that_meet_its_shard;
24 test_a_replayed_step_has_the_same_noise; 26 test_user_seeds_do_not_matter, test_different_purposes_are_independent.

Statistical tests run under a fixed secret: they pass or fail for good, and correct noise fails under a random secret
with probability FALSE_ALARM each.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpshard.errors import ConfigurationError
from dpshard.kernels import native
from dpshard.noise import keyed
from dpshard.noise.keyed import BLOCK, HEAD, KeyedGaussian, SumShard
from dpshard.randomness import RandomSource, derive_key, derive_keys
from tests.noise.sampled import sampled

SECRET = bytes(range(32))
GAUSSIAN = KeyedGaussian(SECRET)
FALSE_ALARM = 1e-7

both_sources = pytest.mark.parametrize("secure", [False, True])


@both_sources
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_noise_does_not_depend_on_the_split(secure, cuts):
    gaussian, bounds = KeyedGaussian(SECRET, secure=secure), [0, *sorted(cuts), 300]
    with mock.patch.object(keyed, "BLOCK", 64), mock.patch.object(keyed, "HEAD", 16):
        whole = sampled(gaussian, 3, "w", 0, 300)
        shards = [sampled(gaussian, 3, "w", a, b) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(shards), whole)


def test_noise_does_not_depend_on_the_number_of_threads():
    threads, shape = torch.get_num_threads(), (8, BLOCK)
    try:
        results = []
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            results.append(GAUSSIAN.add_(torch.ones(shape), step=0, name="w", std=2.0, start=5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@both_sources
def test_noise_does_not_depend_on_what_else_is_released(secure):
    """Short parts are drawn together, several pieces at once."""
    gaussian, sizes = KeyedGaussian(SECRET, secure=secure), [3, 0, 1024, 40_000, 7, 1025, *[5] * 70]
    shards = [SumShard(f"w{i}", torch.full((n,), 2.0), start=i) for i, n in enumerate(sizes)]
    shards.append(SumShard("wide", torch.full((9,), 2.0, dtype=torch.float64)))
    norm = gaussian.release_(shards, step=4, std=0.5, divisor=8.0)
    assert norm.item() == pytest.approx(2 * (sum(sizes) + 9) ** 0.5)
    for shard in shards:
        dtype = torch.float64 if secure else shard.local.dtype
        alone = sampled(gaussian, 4, shard.name, shard.start, shard.start + shard.local.numel(), dtype)
        assert torch.equal(shard.local, (2.0 + 0.5 * alone).to(shard.local.dtype) / 8.0)


def test_noise_does_not_depend_on_the_layout():
    dense = GAUSSIAN.add_(torch.zeros(6, 5), step=0, name="w", std=1.0, start=7)
    for strided in (torch.zeros(5, 6).t(), torch.zeros(6, 10)[:, ::2]):
        assert GAUSSIAN.add_(strided, step=0, name="w", std=1.0, start=7) is strided
        assert torch.equal(strided, dense)
    assert torch.equal(dense.view(-1), sampled(GAUSSIAN, 0, "w", 7, 37))
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    GAUSSIAN.add_(image, step=0, name="w", std=1.0)
    assert torch.equal(image.flatten(), sampled(GAUSSIAN, 0, "w", 0, 120))


@pytest.mark.parametrize("world_size", [1, 3])
def test_standard_deviation_on_any_number_of_ranks(world_size):
    n, std = BLOCK + 12_345, 0.37
    target = torch.full((n,), 100.0, dtype=torch.float64)
    start = 0
    for shard in target.tensor_split(world_size):
        GAUSSIAN.add_(shard, step=1, name="w", std=std, start=start)
        start += shard.numel()
    noise_n = (target - 100.0) / std
    chi_square = float(noise_n.square().sum())
    assert FALSE_ALARM / 2 < stats.chi2.cdf(chi_square, n) < 1 - FALSE_ALARM / 2
    assert stats.kstest(noise_n.numpy()[:200_000], "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("step", "name", "start", "secret"),
    [
        pytest.param(0, "v", 0, SECRET, id="parameter"),
        pytest.param(1, "w", 0, SECRET, id="step"),
        pytest.param(0, "w", BLOCK, SECRET, id="block"),
        pytest.param(0, "w", 100_000, SECRET, id="shard of one block"),
        pytest.param(0, "w", 0, bytes(32), id="run"),
    ],
)
@both_sources
def test_different_purposes_are_independent(step, name, start, secret, secure):
    n = 100_000
    one = sampled(KeyedGaussian(SECRET, secure=secure), 0, "w", 0, n)
    other = sampled(KeyedGaussian(secret, secure=secure), step, name, start, start + n)
    for a, b in ((one, other), (one.square(), other.square())):
        assert stats.pearsonr(a.numpy(), b.numpy()).pvalue > FALSE_ALARM
    assert not torch.isin(one, other).float().mean() > 0.1  # not the same values in another order


def test_a_replayed_step_has_the_same_noise():
    first = sampled(GAUSSIAN, 5, "w", 0, 1000)
    sampled(GAUSSIAN, 6, "w", 0, 1000)
    assert torch.equal(sampled(KeyedGaussian(SECRET), 5, "w", 0, 1000), first)


@both_sources
@pytest.mark.parametrize("start", [HEAD - 3, HEAD, HEAD + 5])
def test_a_shard_may_lie_in_the_rest_of_a_block(secure, start):
    gaussian = KeyedGaussian(SECRET, secure=secure)
    for n in (7, 40_000):
        part = sampled(gaussian, 3, "w", start, start + n)
        assert torch.equal(part, sampled(gaussian, 3, "w", 0, start + n)[start:])


@both_sources
def test_torch_knows_that_a_sum_has_changed(secure):
    """Autograd must not differentiate with a sum that it saved before the noise."""
    for n in (5, 40_000):
        target = torch.zeros(n)
        before = target._version
        KeyedGaussian(SECRET, secure=secure).add_(target, step=0, name="w", std=1.0)
        assert target._version > before


def test_user_seeds_do_not_matter():
    torch.manual_seed(0)
    state, one = torch.get_rng_state(), sampled(GAUSSIAN, 0, "w", 0, 100)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(sampled(GAUSSIAN, 0, "w", 0, 100), one)


def test_a_rank_draws_only_the_blocks_that_meet_its_shard():
    with mock.patch.object(keyed, "BLOCK", 10), mock.patch.object(keyed, "derive_keys", wraps=derive_keys) as keys:
        sampled(GAUSSIAN, 4, "w", 20, 41)
    assert [call.args[1:] for call in keys.call_args_list] == [(("noise", 4), [("w", 2), ("w", 3), ("w", 4)])]


def test_zero_std_and_empty_shards_draw_nothing():
    with mock.patch.object(keyed, "derive_keys", side_effect=AssertionError):
        assert torch.equal(GAUSSIAN.add_(torch.ones(3), step=0, name="w", std=0), torch.ones(3))
        assert GAUSSIAN.add_(torch.ones(0, 4), step=0, name="w", std=1.0).shape == (0, 4)


def test_float64_noise_has_float64_bits():
    sample = sampled(GAUSSIAN, 0, "w", 0, 100, dtype=torch.float64)
    assert (sample != sample.float().double()).all()


def stretch(key, n):
    """Return the `n` normals that are drawn at once under a key."""
    words = RandomSource(key).words(n).view(np.int32).reshape(1, 4, n // 2)
    normals = np.empty((1, 2, n // 2))
    native.box_muller(words, normals, np.empty((4, 1, n // 2)))
    return normals.reshape(-1)


def secure_normals(n):
    """Return the first normals of a parameter's first block in secure mode, by summand: its head, and the rest."""
    key = derive_key(SECRET, "noise", 0, "w", 0)
    rest = derive_key(key, "rest")
    total = np.zeros(n)
    for i in range(4):
        total[:HEAD] += stretch(derive_key(key, "summand", i), HEAD)
        pieces = RandomSource(derive_key(rest, "summand", i)).normals(n - HEAD, np.float64)
        total[HEAD:] += np.concatenate([piece.copy() for piece in pieces])
    return total / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_secure_noise_is_a_sum_that_is_rounded_once(dtype):
    """Check [Note: Secure noise] by plain numpy: sum four normals, add in float64, then round."""
    n, std = 200_000, 0.3
    total = torch.linspace(-5, 5, n, dtype=dtype)
    expected = torch.from_numpy(total.double().numpy() + std * secure_normals(n)).to(dtype)
    secure = KeyedGaussian(SECRET, secure=True)
    assert torch.equal(secure.add_(total.clone(), step=0, name="w", std=std), expected)
    strided = torch.zeros(n, 2, dtype=dtype)[:, 0].copy_(total)
    assert torch.equal(secure.add_(strided, step=0, name="w", std=std), expected)
    if dtype is torch.float32:  # noise rounded first gives other values
        rounded = total + torch.from_numpy(std * secure_normals(n)).float()
        assert (rounded != expected).float().mean() > 0.05


def test_secure_noise_is_normal():
    n = 200_000
    noise_n = sampled(KeyedGaussian(SECRET, secure=True), 0, "w", 0, n, dtype=torch.float64).numpy()
    assert FALSE_ALARM / 2 < stats.chi2.cdf(float(np.square(noise_n).sum()), n) < 1 - FALSE_ALARM / 2
    assert stats.kstest(noise_n, "norm").pvalue > FALSE_ALARM
    assert stats.pearsonr(noise_n[:-1], noise_n[1:]).pvalue > FALSE_ALARM


def test_parameters_that_require_a_gradient_are_fine():
    weight = torch.nn.Parameter(torch.zeros(3, BLOCK))
    GAUSSIAN.add_(weight, step=0, name="w", std=1.0)
    assert weight.is_leaf
    assert torch.equal(weight.detach().flatten(), sampled(GAUSSIAN, 0, "w", 0, 3 * BLOCK))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype):
    with pytest.raises(ConfigurationError, match=r"head.weight.*float32"):
        GAUSSIAN.add_(torch.zeros(3, dtype=dtype), step=0, name="head.weight", std=1.0)


@pytest.mark.parametrize("wrong", [{"std": -1.0}, {"std": float("nan")}, {"std": float("inf")}, {"start": -1}])
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        GAUSSIAN.add_(torch.zeros(3), **({"step": 0, "name": "w", "std": 1.0} | wrong))


def test_sharded_tensors_are_refused():
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    with pytest.raises(ConfigurationError, match="to_local"):
        GAUSSIAN.add_(torch.zeros(3).as_subclass(Sharded), step=0, name="w", std=1.0)


def test_the_secret_is_not_printed():
    assert "secret" not in repr(GAUSSIAN)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both_sources
def test_noise_on_a_gpu_does_not_depend_on_the_split(secure):
    gaussian, n = KeyedGaussian(SECRET, secure=secure), BLOCK + 1000
    whole = sampled(gaussian, 0, "w", 0, n, device="cuda")
    shards = [sampled(gaussian, 0, "w", a, b, device="cuda") for a, b in ((0, 7), (7, BLOCK + 1), (BLOCK + 1, n))]
    assert torch.equal(torch.cat(shards), whole)
    assert FALSE_ALARM / 2 < stats.chi2.cdf(float(whole.double().square().sum()), n) < 1 - FALSE_ALARM / 2
    assert torch.equal(whole.cpu(), sampled(gaussian, 0, "w", 0, n)) == secure


def test_noise_that_float32_would_round_to_zero_is_refused():
    shards = [SumShard("weight", torch.zeros(8))]
    with pytest.raises(ConfigurationError, match="float32 would round it to zero"):
        GAUSSIAN.release_(shards, step=0, std=1e-40)
    assert not shards[0].local.any()
    wide = [SumShard("weight", torch.zeros(8, dtype=torch.float64))]
    GAUSSIAN.release_(wide, step=0, std=1e-40)
    assert wide[0].local.all()
