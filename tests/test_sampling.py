"""Poisson sampling and micro-batches.

Failure modes: 16 test_all_ranks_run_the_same_number_of_micro_batches; 17 test_each_drawn_sample_is_in_exactly_one_row,
test_padding_repeats_a_sample_of_the_batch; 20 test_inclusion_is_bernoulli, test_batch_sizes_are_binomial,
test_inclusions_are_independent, test_a_cap_keeps_a_uniform_subset; 24 test_a_replayed_step_has_the_same_batch;
26 test_user_seeds_do_not_matter.

Statistical tests run under a fixed secret: they pass or fail for good, and a correct sampler fails under a random
secret with probability FALSE_ALARM each.
"""

import itertools
import math
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import IterableDataset, TensorDataset

from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling import PoissonSampler, default_cap, load, plan_micro_batches

SECRET = bytes(range(32))
FALSE_ALARM = 1e-7

drawn_indices = st.lists(st.integers(0, 999), unique=True, max_size=60).map(sorted)


def sampler(sample_size, *batch_sizes, **options):
    return PoissonSampler(sample_size, BatchSchedule(batch_sizes), SECRET, **options)


def inclusions(poisson, steps):
    """Return the batch of each step, bool [steps, N]."""
    included = np.zeros((steps, poisson.sample_size), dtype=bool)
    for step in range(steps):
        included[step, poisson.draw(step)] = True
    return included


@given(n=st.integers(1, 500), data=st.data(), step=st.integers(0, 10))
def test_draws_are_sorted_distinct_indices(n, data, step):
    cap = data.draw(st.none() | st.integers(1, n))
    poisson = sampler(n, data.draw(st.integers(1, n)), max_batch_size=cap)
    indices = poisson.draw(step)
    assert indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0)
    assert not len(indices) or (indices[0] >= 0 and indices[-1] < n)
    assert cap is None or len(indices) <= cap


@pytest.mark.parametrize("batch_size", [3, 50, 97])
def test_inclusion_is_bernoulli(batch_size):
    steps, n = 4000, 100
    included = inclusions(sampler(n, batch_size), steps)
    q = batch_size / n
    # Every position, also the first and the last: the count of each of the n samples is Binomial(steps, q).
    chi_square = ((included.sum(0) - steps * q) ** 2 / (steps * q * (1 - q))).sum()
    assert FALSE_ALARM / 2 < stats.chi2.cdf(chi_square, n) < 1 - FALSE_ALARM / 2


@pytest.mark.parametrize("batch_size", [5, 60])
def test_batch_sizes_are_binomial(batch_size):
    steps, n = 4000, 120
    sizes = inclusions(sampler(n, batch_size), steps).sum(1)
    q = batch_size / n
    # A fixed size, or one size per rank, has another variance than Binomial(n, q).
    dispersion = ((sizes - n * q) ** 2).sum() / (n * q * (1 - q))
    assert FALSE_ALARM / 2 < stats.chi2.cdf(dispersion, steps) < 1 - FALSE_ALARM / 2
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), n, q))
    bins = np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1)
    expected = np.diff([0, *stats.binom.cdf(edges, n, q), 1]) * steps
    assert stats.chisquare(bins, expected).pvalue > FALSE_ALARM


def test_inclusions_are_independent():
    steps, n = 4000, 40
    included = inclusions(sampler(n, 8), steps).astype(float)
    z_scores = np.corrcoef(included.T)[np.triu_indices(n, 1)] * math.sqrt(steps)
    largest = stats.norm.isf(FALSE_ALARM / len(z_scores) / 2)
    assert np.abs(z_scores).max() < largest  # between samples, also neighbours in the data set
    across_steps = stats.pearsonr(included[:-1].ravel(), included[1:].ravel())
    assert across_steps.pvalue > FALSE_ALARM


def test_a_cap_keeps_a_uniform_subset():
    steps, n, cap = 4000, 60, 12
    plain, capped = sampler(n, 15), sampler(n, 15, max_batch_size=cap)
    kept_of_position = np.zeros(n)
    for step in range(steps):
        everybody, kept = plain.draw(step), capped.draw(step)
        assert len(kept) == min(len(everybody), cap)
        assert np.isin(kept, everybody).all()
        kept_of_position[kept] += 1
    # By symmetry every sample is kept equally often; keeping the first ones would favour small indices.
    assert stats.chisquare(kept_of_position).pvalue > FALSE_ALARM


def test_everybody_is_in_at_probability_one():
    np.testing.assert_array_equal(sampler(17, 17).draw(3), np.arange(17))


def test_the_schedule_decides_the_probability():
    poisson = sampler(1000, 10, 500)
    assert (poisson.probability(0), poisson.probability(1), poisson.probability(9)) == (0.01, 0.5, 0.5)
    assert len(poisson.draw(0)) < 50 < 400 < len(poisson.draw(1))


def test_a_replayed_step_has_the_same_batch():
    poisson = sampler(1000, 100, max_batch_size=100)
    first = poisson.draw(5)
    assert not np.array_equal(poisson.draw(6), first)
    np.testing.assert_array_equal(sampler(1000, 100, max_batch_size=100).draw(5), first)


def test_secrets_decide_the_batch():
    other = PoissonSampler(1000, BatchSchedule((100,)), bytes(32))
    assert not np.array_equal(sampler(1000, 100).draw(0), other.draw(0))
    assert "secret" not in repr(other)


def test_user_seeds_do_not_matter():
    torch.manual_seed(0)
    state, one = torch.get_rng_state(), sampler(1000, 100).draw(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    np.testing.assert_array_equal(sampler(1000, 100).draw(0), one)


def test_a_draw_costs_what_it_draws_not_what_there_is():
    poisson = sampler(300_000_000, 256)
    tracemalloc.start()
    begin = time.perf_counter()
    indices = [poisson.draw(step) for step in range(100)]
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Reading 300 million flags once would take 300 MB, and a hundred times some ten seconds.
    assert peak < 2**20
    assert seconds < 1.0
    assert 200 < np.mean([len(drawn) for drawn in indices]) < 312
    assert max(drawn[-1] for drawn in indices) > 250_000_000


def test_default_cap_is_six_deviations_above():
    assert default_cap(65536) == 65536 + 6 * 256
    assert default_cap(10) == 29


@pytest.mark.parametrize("wrong", [{"sample_size": 9}, {"max_batch_size": 0}])
def test_impossible_samplers_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        PoissonSampler(**({"sample_size": 10, "schedule": BatchSchedule((10,)), "secret": SECRET} | wrong))


@given(indices=drawn_indices, size=st.integers(1, 7), world_size=st.integers(1, 5))
def test_each_drawn_sample_is_in_exactly_one_row(indices, size, world_size):
    plans = [p for rank in range(world_size) for p in plan_micro_batches(indices, 4, size, rank, world_size)]
    real = [i for p in plans for i, padding in zip(p.indices, p.is_padding.tolist(), strict=True) if not padding]
    assert sorted(real) == indices
    assert all(len(p.indices) == size and p.is_padding.shape == (size,) and p.step == 4 for p in plans)


@given(n=st.integers(0, 60), size=st.integers(1, 7), world_size=st.integers(1, 5))
def test_all_ranks_run_the_same_number_of_micro_batches(n, size, world_size):
    ranks = [plan_micro_batches(np.arange(n), 0, size, rank, world_size) for rank in range(world_size)]
    count = max(1, math.ceil(n / (size * world_size)))
    for plans in ranks:
        assert [(p.position, p.count) for p in plans] == [(k, count) for k in range(count)]
    shares = [sum(int((~p.is_padding).sum()) for p in plans) for plans in ranks]
    assert max(shares) - min(shares) <= 1


@given(indices=drawn_indices, size=st.integers(1, 7), world_size=st.integers(1, 5))
def test_padding_repeats_a_sample_of_the_batch(indices, size, world_size):
    for rank in range(world_size):
        for plan in plan_micro_batches(indices, 0, size, rank, world_size):
            assert set(plan.indices) <= set(indices or [0])
            assert all(type(i) is int for i in plan.indices)


def test_an_empty_batch_is_one_micro_batch_of_padding():
    (plan,) = plan_micro_batches([], 0, 3)
    assert (plan.indices, plan.is_padding.tolist(), plan.count) == ([0, 0, 0], [True] * 3, 1)


@pytest.mark.parametrize("wrong", [{"micro_batch_size": 0}, {"rank": 2}, {"rank": -1}, {"world_size": 0}])
def test_impossible_plans_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        plan_micro_batches([1], 0, **({"micro_batch_size": 2, "rank": 0, "world_size": 2} | wrong))


class Squares:
    """A map-style data set that is not a class of torch."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "y": index**2}


class ReadTogether(Squares):
    """Like Hugging Face's data sets, whose transforms see all rows of a read, and could mix them."""

    def __getitems__(self, indices):
        raise AssertionError("rows are to be read one by one")


def plans_of(steps=4, size=3, n=50, batch_size=8):
    poisson = sampler(n, batch_size)
    return [plan for step in range(steps) for plan in plan_micro_batches(poisson.draw(step), step, size)]


@pytest.mark.parametrize("dataset", [Squares(), ReadTogether()])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "prefetch_factor": 3}])
def test_data_are_paired_with_their_plans_in_order(dataset, workers):
    plans = plans_of()
    loaded = list(load(dataset, iter(plans), sample_size=50, **workers))
    assert [plan for plan, _ in loaded] == plans
    for plan, batch in loaded:
        assert batch["x"].flatten().tolist() == plan.indices
        assert batch["y"].tolist() == [i**2 for i in plan.indices]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_tensor_datasets_load_as_row_by_row(workers):
    class RowByRow(TensorDataset):
        """A subclass of TensorDataset, which takes the ordinary path."""

    tensors = torch.randn(50, 2, 3), torch.arange(50), torch.rand(50) > 0.5
    quick = load(TensorDataset(*tensors), plans_of(), sample_size=50, **workers)
    plain = load(RowByRow(*tensors), plans_of(), sample_size=50)
    for (_, ours), (_, theirs) in zip(quick, plain, strict=True):
        assert type(ours) is type(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)


@pytest.mark.parametrize("dataset", [list(range(50)), np.arange(50), torch.arange(50)], ids=["list", "array", "tensor"])
def test_plain_containers_are_data_sets(dataset):
    for plan, batch in load(dataset, plans_of(), sample_size=50):
        assert batch.tolist() == plan.indices


def test_collate_fn_is_used():
    for dataset in (list(range(50)), TensorDataset(torch.arange(50))):
        loaded = list(load(dataset, plans_of(), sample_size=50, collate_fn=lambda rows: torch.ones(len(rows))))
        assert loaded
        assert all(torch.equal(batch, torch.ones(3)) for _, batch in loaded)


def test_a_collate_fn_that_sorts_its_rows_does_not_move_the_padding():
    """Row 5: the mask hides the copies after the samples, wherever collation put them."""
    (plan,) = plan_micro_batches([3, 9, 23], 0, 8)
    ((_, data),) = load(
        list(range(50)), [plan], sample_size=50, collate_fn=lambda rows: torch.tensor(sorted(rows, reverse=True))
    )
    assert data[~plan.is_padding].tolist() == [23, 9, 3]
    assert data[plan.is_padding].tolist() == [3] * 5


def test_a_collate_fn_that_drops_rows_is_refused():
    (plan,) = plan_micro_batches([3, 9, 23], 0, 8)
    with pytest.raises(DataError, match="do not drop"):
        list(load(list(range(50)), [plan], sample_size=50, collate_fn=lambda rows: torch.tensor(rows[:2])))


def test_plans_are_read_lazily():
    endless = (plan for step in itertools.count() for plan in plan_micro_batches([step % 50], step, 1))
    seen = []
    watched = (seen.append(plan.step) or plan for plan in endless)
    loaded = load(list(range(50)), watched, sample_size=50)
    assert [next(loaded)[1].item() for _ in range(3)] == [0, 1, 2]
    assert len(seen) <= 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(50))


class Endless:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "remedy"),
    [
        (Stream(), "IterableDataset.*wrap"),
        (Endless(), "no length.*wrap"),
        (iter(range(50)), "__getitem__.*wrap"),
        ([], "empty: check"),
        (list(range(49)), "49 samples.*sample_size=49"),
    ],
)
def test_data_sets_that_cannot_be_sampled_are_refused_at_once(dataset, remedy):
    with pytest.raises(DataError, match=remedy):
        load(dataset, [], sample_size=50)


def test_without_padding_rows_are_samples_and_ranks_agree_on_k():
    """A rank without samples has one row of another rank, which contributes nothing."""
    for drawn in (range(0), range(1), range(7), range(8), range(9)):
        ranks = [plan_micro_batches(list(drawn), 0, 2, rank, 3, pad=False) for rank in range(3)]
        padded = [plan_micro_batches(list(drawn), 0, 2, rank, 3) for rank in range(3)]
        assert len({len(plans) for plans in (*ranks, *padded)}) == 1
        for plans, filled in zip(ranks, padded, strict=True):
            for plan, other in zip(plans, filled, strict=True):
                assert plan.samples == other.samples
                assert plan.min_samples_per_rank == other.min_samples_per_rank <= len(plan.indices)
                assert len(plan.indices) == len(plan.is_padding) == max(1, plan.samples)
                assert plan.indices[: plan.samples] == other.indices[: plan.samples]
