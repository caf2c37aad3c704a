"""Random allocation: every sample is in one uniformly random step of each epoch; a step is a function of the secret."""

import math
import tracemalloc

import numpy as np
import pytest

from dpshard.sampling.allocation import AllocationSampler

SECRET = bytes(range(32))


def epoch(sampler, number=0):
    return [sampler.draw(number * sampler.epoch_steps + t) for t in range(sampler.epoch_steps)]


@pytest.mark.parametrize(("n", "T"), [(1, 1), (1, 5), (7, 3), (1000, 10), (1000, 1), (70_000, 66_000)])
def test_every_sample_is_in_exactly_one_step_of_every_epoch(n, T):
    sampler = AllocationSampler(n, T, SECRET)
    for number in (0, 1):
        drawn = np.concatenate(epoch(sampler, number))
        assert np.array_equal(np.sort(drawn), np.arange(n))
        assert all(np.array_equal(batch, np.unique(batch)) for batch in epoch(sampler, number))


def test_steps_are_uniform_and_independent():
    """Counts of (step in epoch 0, step in epoch 1) and of steps of neighbours; chi^2, false alarms below 1e-6 each."""
    n, T = 200_000, 8
    sampler = AllocationSampler(n, T, SECRET)
    steps = np.empty((2, n), np.int64)
    for number in (0, 1):
        for t, batch in enumerate(epoch(sampler, number)):
            steps[number, batch] = t
    for a, b in ((steps[0], steps[1]), (steps[0, :-1], steps[0, 1:])):
        counts = np.bincount(a * T + b, minlength=T * T)
        expected = len(a) / T**2
        chi2, freedom = ((counts - expected) ** 2 / expected).sum(), T * T - 1
        assert abs(chi2 - freedom) < 5.5 * math.sqrt(2 * freedom) + 20


def test_batch_sizes_vary_as_binomials():
    """Not a permutation cut into equal parts, which the accountant does not cover: 2,000 sizes; far beyond 1e-6."""
    sizes = np.array([len(batch) for batch in epoch(AllocationSampler(200_000, 2000, SECRET))])
    assert sizes.sum() == 200_000
    assert 0.8 < sizes.var() / (100 * (1 - 1 / 2000)) < 1.2


def test_a_step_depends_on_the_secret_and_the_step_only():
    """Resume in the middle of an epoch, on another machine: any order of draws gives the same batches."""
    one, other = AllocationSampler(500, 7, SECRET), AllocationSampler(500, 7, SECRET)
    forwards = [one.draw(step) for step in range(21)]
    for step in reversed(range(21)):
        assert np.array_equal(other.draw(step), forwards[step])
    assert not np.array_equal(AllocationSampler(500, 7, bytes(32)).draw(0), forwards[0])
    assert "secret" not in repr(one)


def test_it_holds_one_epoch():
    """8 N bytes, and no more after many epochs."""
    sampler = AllocationSampler(100_000, 10, SECRET)
    tracemalloc.start()
    for step in range(0, 50, 10):
        sampler.draw(step)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8.5 * 100_000
    assert peak < 3e6 + 16 * 2**20
