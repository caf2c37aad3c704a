"""Runs in a fixed order and of cyclic groups: what they draw, release, count, save and refuse (rows 20, 21, 24)."""

import contextlib
import copy
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import toeplitz
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import BandedInverse, BandMF, PrivacyEngine
from dpshard.accounting import compute_epsilon
from dpshard.accounting.history import succeeds
from dpshard.accounting.spans import Span
from dpshard.clipping.thresholds import QuantileTracking
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError, LogicalBatchError
from dpshard.noise import correlation as correlation_module
from dpshard.noise import workloads
from dpshard.noise.correlation import explicit
from dpshard.noise.keyed import KeyedGaussian
from dpshard.recipes import AdamBC
from dpshard.sampling import CyclicPoissonSampler, FixedOrderSampler
from dpshard.step.chain import Chain
from tests.noise.sampled import sampled

N, B, STEPS = 22, 4, 12
DATA = TensorDataset(torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2)
BISR = {"sampling": "fixed-order", "noise_correlation": BandedInverse(bands=3)}
CYCLIC = {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=3)}
BUFFERED = {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=3, buffers=True)}
OPTIMISED = {
    "sampling": "fixed-order",
    "noise_correlation": BandedInverse(bands=3, workload=workloads.Workload(momentum=0.5)),
}
RUNS = pytest.mark.parametrize(
    "run",
    [BISR, OPTIMISED, CYCLIC, BUFFERED, {"sampling": "fixed-order"}],
    ids=["bisr", "optimised", "band-mf", "buffered", "plain"],
)


def make(**settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    facts = {"batch_size": B, "sample_size": N, "steps": STEPS, "noise_multiplier": 1.0, "verify": False} | settings
    return PrivacyEngine(model, **facts)


def train(engine, steps=None, lr=0.1):
    """Return the private gradients of the steps, flattened."""
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=lr)
    released = []
    for batch in engine.batches(DATA, 2, steps=steps):
        for x, y in batch:
            F.cross_entropy(engine.model(x), y).backward()
        optimizer.step()
        released.append(torch.cat([p.grad.reshape(-1) for p in engine.model.parameters()]))
        optimizer.zero_grad()
    return released


def spans(engine):
    return [(span.start, span.stop) for span in engine._budget.ledger._spans]


# --- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "batch"), [(53, 10), (64, 8), (10, 10), (1, 1), (1000, 7)])
def test_a_fixed_order_takes_each_sample_once_in_n_positions(samples, batch):
    sampler = FixedOrderSampler(samples, batch, bytes(32))
    steps = 3 * samples // batch + 3
    drawn = np.stack([sampler.draw(step) for step in range(steps)])
    order = drawn.reshape(-1)
    assert len(order) == steps * batch
    assert all(sorted(order[i : i + samples]) == list(range(samples)) for i in range(0, 2 * samples, samples))
    for sample in range(0, samples, 1 + samples // 50):
        at = np.flatnonzero((drawn == sample).any(1))
        assert all(b - a >= samples // batch for a, b in itertools.pairwise(at))
    if samples > 10:
        assert list(order[:samples]) != sorted(order[:samples])
        assert list(order) != list(np.concatenate([FixedOrderSampler(samples, batch, b"1" * 32).draw(0)]))


def test_cyclic_sampling_draws_each_sample_in_its_turn_with_its_probability():
    sampler = CyclicPoissonSampler(23, 3, 5, bytes(32))
    times = np.zeros(23)
    for step in range(4_000):
        drawn = sampler.draw(step)
        assert (drawn % 5 == step % 5).all()
        times[drawn] += 1
    # Of 800 turns each, q b = 15/23: 6 standard deviations leave 1e-7 for 23 samples.
    assert np.abs(times / 800 - 15 / 23).max() < 6 * np.sqrt(15 / 23 * 8 / 23 / 800)


# --- noise ----------------------------------------------------------------------------------------------------------


class Recorded(contextlib.AbstractContextManager):
    """Sums and noise secrets of the releases in this block, in their order."""

    def __init__(self):
        self.sums, self.secrets, self._gather = [], [], KeyedGaussian.release_

    def __enter__(self):
        recorded = self

        def release_(self, shards, *, step, std, divisor=1.0):
            recorded.sums.append(torch.cat([shard.local.reshape(-1) for shard in shards]).clone())
            recorded.secrets.append(self.secret)
            return recorded._gather(self, shards, step=step, std=std, divisor=divisor)

        KeyedGaussian.release_ = release_
        return self

    def __exit__(self, *exc):
        KeyedGaussian.release_ = self._gather

    def expected(self, engine, path, *, secure=False):
        """What the releases `path` are by the matrix W and vectors z, each drawn alone under the key of its step."""
        mechanism = engine.mechanism
        correlation = mechanism.correlation
        W = torch.from_numpy(np.tril(toeplitz(correlation.noising(STEPS))))[: len(path), : len(path)]
        keyed = [KeyedGaussian(self.secrets[i], secure) for i in path]
        parts = (("weight", 6), ("bias", 2))
        z = torch.stack([torch.cat([sampled(k, t, name, 0, n) for name, n in parts]) for t, k in enumerate(keyed)])
        std = mechanism.noise_multiplier * mechanism.max_grad_norm * mechanism.sensitivity
        return (torch.stack([self.sums[i] for i in path]).double() + std * W @ z.double()) / B


@RUNS
@pytest.mark.parametrize("secure", [False, True])
def test_a_release_is_the_sum_and_the_weighted_vectors_of_this_and_earlier_steps(run, secure):
    engine = make(**run, secure_mode=secure, max_grad_norm=0.5)
    with Recorded() as recorded:
        released = torch.stack(train(engine)).double()
    assert torch.allclose(released, recorded.expected(engine, range(STEPS), secure=secure), atol=1e-6)
    weights = engine.mechanism.noise_weights(STEPS - 1)
    assert engine.gradient_noise_std == pytest.approx(0.5 * engine.mechanism.sensitivity * np.linalg.norm(weights) / B)
    assert len(set(recorded.secrets)) == STEPS


@pytest.mark.parametrize("run", [OPTIMISED, BUFFERED], ids=["optimised", "buffered"])
def test_metrics_and_adam_know_the_noise_of_every_step(run):
    """Its deviation is that of a row of W: at the first steps it has fewer vectors."""
    engine, noise_sq = make(**run), 0.0
    optimizer = AdamBC(engine.model.parameters(), noise_std=lambda: engine.gradient_noise_std, betas=(0.9, 0.8))
    rows = np.tril(toeplitz(engine.mechanism.correlation.noising(STEPS)))
    elements = sum(p.numel() for p in engine.model.parameters())
    for batch, row in zip(engine.batches(DATA, 2), rows, strict=True):
        for x, y in batch:
            F.cross_entropy(engine.model(x), y).backward()
        optimizer.step()
        std, metrics = engine.mechanism.sensitivity * np.linalg.norm(row), engine.metrics()
        assert engine.gradient_noise_std == pytest.approx(std / B, rel=1e-9)
        assert metrics["gradient_snr"] == pytest.approx(metrics["clipped_sum_norm"] / (std * elements**0.5), rel=1e-6)
        noise_sq = 0.8 * noise_sq + 0.2 * (std / B) ** 2
        assert float(optimizer.state[engine.model.weight]["noise_sq"]) == pytest.approx(noise_sq, rel=1e-5)
        optimizer.zero_grad()


@pytest.mark.parametrize("run", [BISR, CYCLIC, BUFFERED], ids=["bisr", "band-mf", "buffered"])
def test_a_branch_has_the_noise_of_its_path(run):
    """Seven steps, then from the state after four on with other sums."""
    engine, released = make(**run), []
    with Recorded() as recorded:
        released += train(engine, 4)
        state = engine.state_dict()
        released += train(engine, 3)
        with pytest.warns(UserWarning, match="goes back"):
            engine.load_state_dict(state)
        with pytest.warns(UserWarning, match="another branch"):
            released += train(engine, lr=0.3)
    path = [*range(4), *range(7, 7 + STEPS - 4)]
    assert torch.allclose(torch.stack(released)[path].double(), recorded.expected(engine, path), atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(CYCLIC, BUFFERED), (BUFFERED, CYCLIC)], ids=["begin", "end"])
def test_buffers_may_begin_and_end_at_a_resume(first, second):
    """Repeated steps then have other keys, so they are charged: their noise is rounded otherwise."""
    engine, other, released = make(**first), make(**second), []
    with Recorded() as recorded:
        released += train(engine, 5)
        state = engine.state_dict()
        other.load_state_dict(state)
        other.model.load_state_dict(engine.model.state_dict())
        train(engine, 1)
        released += train(other)
    path = [*range(5), *range(6, STEPS + 1)]
    assert torch.allclose(torch.stack(released).double(), recorded.expected(other, path), atol=1e-6)
    assert torch.equal(recorded.sums[5], recorded.sums[6])
    assert recorded.secrets[5] != recorded.secrets[6]


# --- accounting -----------------------------------------------------------------------------------------------------


@RUNS
def test_the_engine_counts_as_the_plan_says(run):
    engine = make(**run)
    for step in range(1, STEPS + 1):
        train(engine, 1)
        assert engine.epsilon() == compute_epsilon(engine.mechanism.releases(step), 1e-5)
    assert "zero-out neighbours" in engine.statement()
    with pytest.raises(BudgetExceededError, match="not planned"):
        train(engine, 1)


@RUNS
def test_a_calibrated_run_reaches_its_budget_and_no_further(run):
    engine = make(**run, noise_multiplier=None, target_epsilon=3.0)
    train(engine)
    assert 2.99 < engine.epsilon() <= 3.0


def test_a_branch_costs_what_its_path_moves():
    """Leaves after 7 and 12 steps: the root of the sum of their squared sensitivities, under one noise."""
    engine = make(**BISR)
    train(engine, 5)
    state = engine.state_dict()
    train(engine, 2)
    with pytest.warns(UserWarning, match="goes back"):
        engine.load_state_dict(state)
    with pytest.warns(UserWarning, match="another branch"):
        train(engine, lr=0.3)
    moved = engine.mechanism.scheme._sensitivities
    assert spans(engine) == [(0, 7), (5, 12)]
    (release,) = engine._budget.ledger._cost
    assert release.noise_multiplier == pytest.approx(moved[-1] / np.hypot(moved[6], moved[11]))
    assert engine.epsilon() > compute_epsilon(engine.mechanism.releases(), 1e-5)


def test_branches_that_end_at_equal_steps_are_not_joined():
    """A release that follows another path than the last one is a new leaf, also if its step is the next one."""
    engine = make(**BISR)
    train(engine, 3)
    fork = copy.deepcopy(engine.model.state_dict()), engine.state_dict()
    train(engine, 3)
    first = copy.deepcopy(engine.model.state_dict()), engine.state_dict()

    def go_to(place):
        engine.model.load_state_dict(place[0])
        with (
            pytest.warns(UserWarning, match="goes back")
            if engine.step > place[1]["ledger"]["steps"]
            else contextlib.nullcontext()
        ):
            engine.load_state_dict(place[1])

    go_to(fork)
    engine.model.weight.data += 1
    with pytest.warns(UserWarning, match="another branch"):
        train(engine, 3)
    go_to(first)
    train(engine, 2)
    assert spans(engine) == [(0, 6), (3, 6), (6, 8)]


def test_a_cyclic_branch_costs_more_in_the_windows_that_it_meets():
    scheme = make(**CYCLIC).mechanism.scheme
    one = [Span("", 0, 12, scheme.release, False)]
    assert scheme.cost(one) == {scheme.release: 4}
    found = scheme.cost([*one, Span("", 4, 5, scheme.release, False)])
    assert sorted((r.noise_multiplier, n) for r, n in found.items()) == [
        (pytest.approx(2**-0.5), 2),  # windows [0, 6) and [3, 9) hold step 4
        (1.0, 2),
    ]


# --- state ----------------------------------------------------------------------------------------------------------


@RUNS
@pytest.mark.parametrize("at", [1, 5])
def test_a_resumed_run_releases_the_same_bits_at_no_cost(run, at):
    straight = make(**run)
    whole = train(straight, at)
    model, state = copy.deepcopy(straight.model.state_dict()), json.loads(json.dumps(straight.state_dict()))
    whole += train(straight)
    resumed = make(**run)
    resumed.load_state_dict(state, released=None)
    resumed.model.load_state_dict(model)
    assert torch.equal(torch.stack(train(resumed)), torch.stack(whole[at:]))
    assert resumed.epsilon() == straight.epsilon()
    assert spans(resumed) == spans(straight) == [(0, STEPS)]


def test_a_step_with_equal_sums_after_other_sums_has_another_key():
    """Else two empty batches after different ones would share their noise: their difference would show the latter."""

    def path(*sums):
        chain = Chain(2)
        for each in sums:
            link, identity = chain.next(bytes(32), each)
            chain.append(link)
        return link, identity

    empty = (1, 0, 0)
    assert path((0, 5, 7), empty) == path((0, 5, 7), empty)
    for one, other in zip(path((0, 5, 7), empty), path((0, 5, 8), empty), strict=True):
        assert one != other


def test_identities_name_their_predecessor():
    engine, noted = make(**BISR), []
    engine.internals.note_releases(lambda step, identity: noted.append(identity) or (lambda: None))
    train(engine)
    assert all(len(identity) == 16 for identity in noted)
    for (i, a), (j, b) in itertools.product(enumerate(noted), repeat=2):
        assert succeeds(b, a) == (j == i + 1)


def test_a_state_without_its_keys_is_refused():
    engine = make(**BISR)
    train(engine, 4)
    from dpshard import checkpoint

    unpacked = checkpoint.unpack(engine.state_dict(), engine.mechanism)
    assert len(unpacked.noise) == 2
    lacking = checkpoint.pack(
        engine.mechanism, unpacked.secret, unpacked.account, noise=unpacked.noise[1:], order=unpacked.order
    )
    with pytest.raises(CheckpointError, match="lacks the keys of the noise before step 5"):
        make(**BISR).load_state_dict(lacking)


@pytest.mark.parametrize(
    "other", [{}, CYCLIC, {"sampling": "fixed-order"}, BISR | {"noise_correlation": BandedInverse(bands=4)}]
)
def test_the_state_of_another_mechanism_is_refused(other):
    engine = make(**BISR)
    train(engine, 2)
    with pytest.raises(CheckpointError, match="another mechanism"):
        make(**other).load_state_dict(engine.state_dict())


def test_a_run_keeps_the_default_coefficients_that_it_began_with(monkeypatch):
    """Another scipy may find others: then the releases would be neither those of the old C nor of the new one."""
    engine = make(**CYCLIC)
    train(engine, 2)
    state = engine.state_dict()
    begun = explicit(BandMF(bands=3), STEPS, STEPS)
    found = workloads.optimised(3, STEPS, STEPS, workloads.Workload(), inverted=False)
    assert begun.coefficients == tuple(found)
    make(**CYCLIC | {"noise_correlation": begun}).load_state_dict(state)
    monkeypatch.setattr(correlation_module, "optimised", lambda *length, inverted: found * [1, 1, 0.999])
    explicit.cache_clear()
    with pytest.raises(CheckpointError, match=r"Those saved are BandMF\(bands=3, coefficients=\(1.0, "):
        make(**CYCLIC).load_state_dict(state)
    resumed = make(**CYCLIC | {"noise_correlation": begun})
    resumed.load_state_dict(state)
    explicit.cache_clear()


@pytest.mark.parametrize("kind", [BandMF, BandedInverse])
@pytest.mark.parametrize("steps", [2, 3, 9])
def test_explicit_coefficients_are_the_default_ones(kind, steps):
    default, named = kind(bands=3), explicit(kind(bands=3), steps, steps)
    assert np.array_equal(default.noising(steps), named.noising(steps))
    assert np.array_equal(default.strategy(steps), named.strategy(steps))
    assert explicit(named, steps, steps) == named


def test_going_back_to_an_earlier_state_of_another_process_warns_of_what_is_forgotten():
    engine = make(**BISR)
    train(engine, 4)
    early = engine.state_dict()
    train(engine)
    late, other = engine.state_dict(), make(**BISR)
    other.load_state_dict(late)
    with pytest.warns(UserWarning, match="at step 12 of the run.*12 or more"):
        other.load_state_dict(early)
    other.load_state_dict(early, released=12)
    assert other.epsilon() == engine.epsilon()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_correlation": BandedInverse(bands=2)}, "under sampling='poisson'"),
        ({"noise_correlation": "bisr"}, "pass dpshard.BandedInverse"),
        ({"sampling": "shuffled"}, "choose one of"),
        (BISR | {"sampling": "cyclic-poisson"}, "needs BandMF"),
        (CYCLIC | {"noise_correlation": None}, "needs BandMF"),
        (BISR | {"adaptive_clipping": QuantileTracking()}, "needs fixed thresholds"),
        (BISR | {"max_batch_size": 9}, "not analysed with a cap"),
        (BISR | {"noise": "discrete-gaussian", "accountant": "rdp"}, "for Gaussian noise"),
        (BISR | {"batch_size": [(4, 2), (5, 1)], "steps": None}, "one batch size in all steps"),
    ],
)
def test_what_is_not_analysed_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**settings)


def test_batches_of_the_scripts_own_are_refused():
    """In a fixed order they are checked: test_orders.py."""
    engine = make(**CYCLIC)
    x, y = DATA[:4]
    with pytest.warns(UserWarning, match="feeds its own batches"):
        F.cross_entropy(engine.model(x), y).backward()
    with pytest.raises(LogicalBatchError, match="sampling='cyclic-poisson' draws samples by a secret"):
        engine.privatize()
