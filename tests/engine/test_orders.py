"""Balls in bins, streams and loops of the user's own in a fixed order (rows 17, 20, 21, 24)."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from dpshard import BandedInverse, BandMF, PrivacyEngine, QuantileTracking
from dpshard.accounting import Release, compute_epsilon
from dpshard.errors import AccountingError, CheckpointError, ConfigurationError, DataError, LogicalBatchError
from dpshard.noise.keyed import KeyedGaussian

N, B = 22, 4
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2
DATA = TensorDataset(X, Y)


class Items(IterableDataset):
    """The samples in an order, again every epoch; `orders[epoch]` if there are several."""

    def __init__(self, *orders, transform=lambda x: x):
        self.orders, self.transform, self.epochs = orders or (range(N),), transform, 0

    def __iter__(self):
        order = self.orders[min(self.epochs, len(self.orders) - 1)]
        self.epochs += 1
        return ((self.transform(X[i % N]), Y[i % N]) for i in order)


def make(sampling, **settings):
    torch.manual_seed(0)
    facts = {"batch_size": B, "sample_size": N, "steps": 12, "noise_multiplier": 1.0, "verify": False} | settings
    return PrivacyEngine(nn.Linear(3, 2), sampling=sampling, **facts)


def step(engine, logical_batch, lr=0.1):
    for x, y in logical_batch:
        F.cross_entropy(engine.model(x), y).backward()
    torch.optim.SGD(engine.model.parameters(), lr=lr).step()
    released = torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()])
    engine.model.zero_grad()
    return released


def train(engine, data, steps=None, **options):
    """Return the private gradients of the steps."""
    return [step(engine, batch) for batch in engine.batches(data, 2, steps=steps, **options)]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- balls in bins --------------------------------------------------------------------------------------------------


def test_balls_in_bins_costs_its_epochs():
    """Six steps an epoch: two whole epochs, and one step of the third."""
    engine = make("balls-in-bins", steps=13, target_delta=1e-3)
    assert engine.mechanism.releases() == (
        (Release(1.0, 1.0, N, allocated_steps=6), 2),
        (Release(1.0, 1 / 6, N, allocated_steps=1), 1),
    )
    spent = []
    for batch in engine.batches(DATA, 2):
        step(engine, batch)
        spent.append(engine.epsilon(1e-5))
    assert spent == sorted(set(spent))
    assert spent[-1] == compute_epsilon(engine.mechanism.releases(), 1e-5)
    assert spent[5] == compute_epsilon(((Release(1.0, 1.0, N, allocated_steps=6), 1),), 1e-5)
    assert "13 releases in epochs of 6, with every sample in one random step of each" in engine.statement()
    assert "zero-out neighbours at fixed N" in engine.statement()


def test_every_sample_takes_part_once_an_epoch():
    """The indices of the tensors that the loop gets; padding does not count."""
    engine, seen = make("balls-in-bins"), np.zeros((2, N), int)
    for number, batch in enumerate(engine.batches(TensorDataset(X, torch.arange(N)), 3)):
        for x, index in batch:
            seen[number // 6, index[~batch.is_padding].numpy()] += 1
            F.cross_entropy(engine.model(x), index % 2).backward()
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
        engine.model.zero_grad()
    assert (seen == 1).all()


def test_a_target_is_met_by_the_whole_run_and_not_exceeded():
    engine = make("balls-in-bins", noise_multiplier=None, target_epsilon=2.0, target_delta=1e-3, epochs=2, steps=None)
    assert engine.steps == 12
    train(engine, DATA)
    assert 1.99 < engine.epsilon() <= 2.0


def test_balls_in_bins_resumes_in_the_middle_of_an_epoch_at_no_cost():
    whole = make("balls-in-bins")
    first = train(whole, DATA, 4)
    state, model = (
        json.loads(json.dumps(whole.state_dict())),
        {k: v.clone() for k, v in whole.model.state_dict().items()},
    )
    rest = train(whole, DATA)
    resumed = make("balls-in-bins")
    resumed.load_state_dict(state)
    resumed.model.load_state_dict(model)
    assert equal(train(resumed, DATA), rest)
    assert len(first) + len(rest) == 12
    assert resumed.epsilon(1e-5) == whole.epsilon(1e-5)
    # In the process that made them, too: equal sums are one release.
    before = whole.epsilon(1e-5)
    with pytest.warns(UserWarning, match="goes back from step 12 to step 4"):
        whole.load_state_dict(state)
    whole.model.load_state_dict(model)
    assert equal(train(whole, DATA), rest)
    assert whole.epsilon(1e-5) == before


def test_another_branch_of_an_epoch_is_charged():
    engine = make("balls-in-bins", steps=6)
    train(engine, DATA, 2)
    state = engine.state_dict()
    train(engine, DATA)
    with pytest.warns(UserWarning, match="goes back from step 6 to step 2"):
        engine.load_state_dict(state)
    torch.nn.init.zeros_(engine.model.weight)
    with pytest.warns(UserWarning, match="was released before"):
        train(engine, DATA)
    twice = Release(1.0 / 2**0.5, 1.0, N, allocated_steps=6)
    assert engine.epsilon(1e-5) == compute_epsilon(((twice, 1),), 1e-5)


def test_with_correlated_noise_a_sample_is_in_the_same_step_of_every_epoch():
    """Six steps an epoch. The run is one release from its first step on; the statement names its simulation."""
    engine, seen = make("balls-in-bins", noise_correlation=BandedInverse(bands=3)), np.zeros((12, N), int)
    for number, batch in enumerate(engine.batches(TensorDataset(X, torch.arange(N)), 3)):
        for x, index in batch:
            seen[number, index[~batch.is_padding].numpy()] += 1
            F.cross_entropy(engine.model(x), index % 2).backward()
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
        engine.model.zero_grad()
        assert engine.epsilon(1e-3) == compute_epsilon(engine.mechanism.releases(), 1e-3)
    assert np.array_equal(seen[:6], seen[6:])
    assert (seen[:6].sum(0) == 1).all()
    assert "one release of 12 sums, with every sample in one random step of 6, the same in each" in engine.statement()
    assert "delta includes 1e-12 for a failure of the public simulation" in engine.statement()


def test_correlated_bins_resume_at_no_cost_and_branches_are_charged():
    correlation = BandedInverse(bands=3)
    whole = make("balls-in-bins", noise_correlation=correlation)
    train(whole, DATA, 4)
    state = json.loads(json.dumps(whole.state_dict()))
    model = {k: v.clone() for k, v in whole.model.state_dict().items()}
    rest = train(whole, DATA)
    resumed = make("balls-in-bins", noise_correlation=correlation)
    resumed.load_state_dict(state)
    resumed.model.load_state_dict(model)
    assert equal(train(resumed, DATA), rest)
    assert resumed.epsilon(1e-3) == whole.epsilon(1e-3) == compute_epsilon(whole.mechanism.releases(), 1e-3)
    with pytest.warns(UserWarning, match="goes back from step 12 to step 4"):
        whole.load_state_dict(state)
    torch.nn.init.zeros_(whole.model.weight)
    with pytest.warns(UserWarning, match="was released before"):
        train(whole, DATA)
    twice = dataclasses.replace(whole.mechanism.release(0), noise_multiplier=0.5**0.5)
    assert whole.epsilon(1e-3) == pytest.approx(compute_epsilon(((twice, 1),), 1e-3), rel=1e-12)


def test_adaptive_thresholds_are_covered():
    engine = make("balls-in-bins", adaptive_clipping=QuantileTracking(0.5))
    before = dict(engine.thresholds)
    train(engine, DATA)
    assert engine.thresholds != before
    assert engine.epsilon(1e-5) == compute_epsilon(((Release(1.0, 1.0, N, allocated_steps=6), 2),), 1e-5)
    assert "clipping count" in engine.statement()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"noise_correlation": BandedInverse(bands=2), "adaptive_clipping": QuantileTracking(0.5)},
            ConfigurationError,
            "one sensitivity holds for the run",
        ),
        ({"max_batch_size": 8}, ConfigurationError, "cap"),
        ({"batch_size": [(4, 3), (8, 3)], "steps": None}, ConfigurationError, "one batch size in all steps"),
        ({"noise": "discrete-gaussian", "accountant": "rdp"}, ConfigurationError, "noise='gaussian'"),
        ({"accountant": "rdp"}, AccountingError, "accountant='pld'"),
    ],
)
def test_what_balls_in_bins_cannot_account_for_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        make("balls-in-bins", **settings)


@pytest.mark.parametrize("sampling", ["balls-in-bins", "poisson"])
def test_streams_need_a_fixed_order(sampling):
    with pytest.raises(DataError, match="sampling='fixed-order'"):
        make(sampling).batches(Items(), 2)


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_an_own_loop_of_balls_in_bins_is_refused():
    engine = make("balls-in-bins")
    F.cross_entropy(engine.model(X[:4]), Y[:4]).backward()
    with pytest.raises(LogicalBatchError, match=r"engine\.batches"):
        engine.privatize()
    assert engine.step == 0


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_costs_what_a_fixed_order_costs_and_hands_out_its_samples():
    engine, fixed = make("fixed-order"), make("fixed-order")
    seen = []
    for batch in engine.batches(Items(), 3):
        for x, y in batch:
            seen += x[~batch.is_padding].tolist()
            F.cross_entropy(engine.model(x), y).backward()
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
        engine.model.zero_grad()
    assert seen == torch.cat([X, X, X])[: 12 * B].tolist()
    train(fixed, DATA)
    assert engine.epsilon(1e-5) == fixed.epsilon(1e-5)


@pytest.mark.parametrize("begun", [3, 5, 8])
def test_a_stream_resumes_in_the_middle_of_an_epoch(begun):
    whole = make("fixed-order")
    train(whole, Items(), begun)
    state, model = (
        json.loads(json.dumps(whole.state_dict())),
        {k: v.clone() for k, v in whole.model.state_dict().items()},
    )
    rest = train(whole, Items())
    resumed = make("fixed-order")
    resumed.load_state_dict(state)
    resumed.model.load_state_dict(model)
    assert equal(train(resumed, Items()), rest)
    assert len(rest) == 12 - begun
    assert resumed.epsilon(1e-5) == whole.epsilon(1e-5)


@pytest.mark.parametrize(
    ("stream", "released", "message"),
    [
        (Items([0, *range(21)]), 0, "1 of them are equal"),
        (Items([*range(8), 0, *range(9, 22)]), 2, "A sample of step 3 was in step 1, too"),
        (Items(range(N), reversed(range(N))), 5, "equal to others|was in step"),
        (Items(range(21)), 5, "21 samples instead of"),
        (Items(range(23)), 5, "more samples than"),
        (Items(transform=lambda x: x + torch.rand(())), 6, "more different samples than sample_size=22"),
    ],
)
def test_a_stream_that_is_not_in_a_fixed_order_stops_before_the_release(stream, released, message):
    engine = make("fixed-order")
    with pytest.raises(DataError, match=message):
        train(engine, stream)
    assert engine.step <= released
    assert engine.epsilon(1e-5) == (
        0 if engine.step == 0 else compute_epsilon(engine.mechanism.releases(engine.step), 1e-5)
    )


def test_another_stream_after_a_resume_is_refused():
    engine = make("fixed-order")
    train(engine, Items(), 4)
    resumed = make("fixed-order")
    resumed.load_state_dict(engine.state_dict())
    with pytest.raises(DataError, match="too"):
        train(resumed, Items([*range(16, 22), *range(16)]))


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"pin_memory": True}])
def test_readers_that_a_stream_cannot_have_are_refused(options):
    with pytest.raises(DataError, match=next(iter(options))):
        make("fixed-order").batches(Items(), 2, **options)


def test_a_run_keeps_its_kind_of_source():
    engine = make("fixed-order")
    train(engine, DATA, 2)
    with pytest.raises(DataError, match="a map-style data set so far, and now from a stream"):
        train(engine, Items())
    with pytest.raises(DataError, match="and now from a loop of your own"):
        own(engine, [range(4)])
    resumed = make("fixed-order")
    resumed.load_state_dict(engine.state_dict())
    with pytest.raises(DataError, match="now from a stream"):
        train(resumed, Items())
    assert len(train(make("fixed-order"), DATA, 2)) == 2


def test_a_state_without_participation_is_refused():
    engine = make("fixed-order")
    train(engine, Items(), 2)
    from dpshard import checkpoint

    state = {k: v for k, v in engine.state_dict().items() if k not in ("order", "digest")}
    state["digest"] = checkpoint.engine_state.digest_of(state)
    with pytest.raises(CheckpointError, match="which samples took part"):
        make("fixed-order").load_state_dict(state)


def test_units_of_a_stream():
    class Units(Items):
        def __iter__(self):
            return ((X[2 * i : 2 * i + 2], Y[2 * i : 2 * i + 2]) for i in range(N // 2))

    engine = make("fixed-order", sample_size=N // 2, rows_per_unit=2, batch_size=3)
    assert len(train(engine, Units())) == 12


# --- loops of the user's own ----------------------------------------------------------------------------------------


def own(engine, batches, parts=1):
    """Train on rows, in an ordinary loop."""
    released = []
    for rows in batches:
        for part in torch.tensor(list(rows)).chunk(parts):
            F.cross_entropy(engine.model(X[part]), Y[part]).backward()
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
        released.append(torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()]))
        engine.model.zero_grad()
    return released


EPOCH = [range(4), range(4, 8), range(8, 12), range(12, 16), range(16, 20), range(20, 22)]


@pytest.mark.parametrize("epoch", [EPOCH, EPOCH[:-1]], ids=["all", "drop_last"])
def test_an_ordinary_loader_is_as_good_as_the_engines_batches(epoch):
    engine = make("fixed-order")
    loader = DataLoader(DATA, batch_size=B, shuffle=False, drop_last=epoch is not EPOCH)
    steps = 0
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(engine.model(x), y).backward()
            torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
            engine.model.zero_grad()
            steps += 1
    assert engine.step == steps == 2 * len(epoch)
    fixed = make("fixed-order")
    train(fixed, DATA, steps)
    assert engine.epsilon(1e-5) == fixed.epsilon(1e-5)
    assert "of batches that the script fed" in engine.statement()


def test_micro_batches_between_two_steps_are_one_logical_batch():
    one, several = make("fixed-order"), make("fixed-order")
    several._secret = one._secret
    for a, b in zip(own(one, [range(4), range(4, 8)]), own(several, [range(4), range(4, 8)], parts=2), strict=True):
        assert a.shape == b.shape
    assert one.step == several.step == 2


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[0, 1, 2, 2]], "1 of them are equal"),
        ([[0, 1, 2, 3], [4, 5, 6, 0]], "A sample of step 2 was in step 1, too"),
        ([*EPOCH, [21, 1, 2, 3]], "A sample of step 7 was in step 6, too"),
        ([[0, 1, 2]], "got 3 samples over all ranks"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "got 8 samples over all ranks"),
    ],
)
def test_a_loop_in_another_order_stops_before_the_release(batches, message):
    engine = make("fixed-order")
    own(engine, batches[:-1])
    with pytest.raises(DataError, match=message):
        own(engine, batches[-1:])
    assert engine.step == len(batches) - 1
    with pytest.raises(DataError, match=message):  # the sums stay refused
        engine.privatize()


def test_a_mask_with_as_many_rows_as_the_batch_does_not_hide_a_sample():
    """Row i of the mask [T, T] is not of sample i: at another place, a sample would pass for another one."""

    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(mask @ x).mean(1)

    facts = {"batch_size": B, "sample_size": N, "steps": 12, "noise_multiplier": 1.0, "sampling": "fixed-order"}
    engine = PrivacyEngine(Masked(3, 2), **facts)
    sequences, mask = torch.randn(N, B, 3, generator=torch.Generator().manual_seed(1)), torch.tril(torch.ones(B, B))

    def feed(rows):
        F.cross_entropy(engine.model(sequences[rows], mask), Y[rows]).backward()
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
        engine.model.zero_grad()

    feed([0, 1, 2, 3])
    with pytest.raises(DataError, match="A sample of step 2 was in step 1, too"):
        feed([3, 4, 5, 6])


def test_packed_rows_of_an_own_loop_are_refused():
    """They hold several samples."""
    engine = make("fixed-order", verify=True)
    with engine.packed(torch.arange(4)[:, None].expand(4, 3), 4), pytest.raises(LogicalBatchError, match="packing="):
        engine.model(X[:4])


def test_a_shuffled_loader_is_refused():
    engine, torch_seed = make("fixed-order", steps=100), torch.Generator().manual_seed(0)
    loader = DataLoader(DATA, batch_size=B, shuffle=True, generator=torch_seed)

    def epochs():
        for _ in range(3):
            for x, y in loader:
                F.cross_entropy(engine.model(x), y).backward()
                torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
                engine.model.zero_grad()

    with pytest.raises(DataError, match="was in step"):
        epochs()
    assert engine.step <= 12


def test_rows_that_change_at_random_are_refused():
    engine = make("fixed-order")

    def epochs():
        for k in range(12):
            rows = torch.tensor(EPOCH[k % 5])
            F.cross_entropy(engine.model(X[rows] + torch.rand(4, 1)), Y[rows]).backward()
            torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
            engine.model.zero_grad()

    with pytest.raises(DataError, match="more different samples"):
        epochs()
    assert engine.step == 5


def test_a_loader_that_begins_anew_after_a_resume_is_refused():
    engine = make("fixed-order")
    own(engine, EPOCH[:3])
    resumed = make("fixed-order")
    resumed.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    with pytest.raises(DataError, match="A sample of step 4 was in step 1, too"):
        own(resumed, EPOCH[:1])
    resumed = make("fixed-order")
    resumed.load_state_dict(engine.state_dict())
    assert len(own(resumed, EPOCH[3:])) == 3


def test_sums_whose_release_failed_after_it_was_counted_are_dropped(monkeypatch):
    """Else a later step would release the samples that took part in the counted one, and the next epoch come early."""
    engine = make("fixed-order", batch_size=2, steps=30)
    own(engine, [[0, 1], [2, 3]])

    def failing(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(KeyedGaussian, "release_", failing)
        with pytest.raises(MemoryError):
            own(engine, [[4, 5]])
    assert engine.step == 3
    engine.privatize()  # nothing is left
    assert engine.step == 3
    assert all(p.grad is None for p in engine.model.parameters())
    own(engine, [[6, 7]])
    with pytest.raises(DataError, match="A sample of step 5 was in step 3, too"):
        own(engine, [[4, 5]])


@pytest.mark.parametrize("sampling", ["fixed-order", "balls-in-bins", "cyclic-poisson"])
@pytest.mark.parametrize("kind", ["rows", "indices"])
def test_another_order_of_the_rows_is_refused(sampling, kind):
    """An epoch that shuffles its data set: a sample could come in neighbouring steps."""

    def shuffled(seed):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
        if kind == "rows":
            return TensorDataset(X[order], Y[order])
        return Subset([(X[i], Y[i]) for i in range(N)], order)

    settings = {"noise_correlation": BandMF(bands=2)} if sampling == "cyclic-poisson" else {}
    engine = make(sampling, **settings)
    train(engine, shuffled(0), 2)
    train(engine, shuffled(0), 1)
    with pytest.raises(DataError, match="in another order"):
        train(engine, shuffled(1), 1)
    state = json.loads(json.dumps(engine.state_dict()))
    for released in (None, 3):
        resumed = make(sampling, **settings)
        resumed.load_state_dict(state, released=released)
        resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        with pytest.raises(DataError, match="in another order"):
            train(resumed, shuffled(1), 1)
        train(resumed, shuffled(0), 1)
    poisson = make("poisson")
    train(poisson, shuffled(0), 2)
    train(poisson, shuffled(1), 2)


def test_evaluation_and_left_batches_do_not_take_part():
    engine = make("fixed-order")
    with torch.no_grad():
        engine.model(X[:4])
    batches = engine.batches(Items(), 2)
    next(batches)
    batches.close()
    assert len(train(engine, Items(), 2)) == 2


def test_the_sampler_of_balls_in_bins_is_the_accounted_one():
    engine = make("balls-in-bins")
    sampler = engine._samples.sampler(engine._secret)
    assert sampler.epoch_steps == engine.mechanism.scheme.release.epoch_steps == 6
