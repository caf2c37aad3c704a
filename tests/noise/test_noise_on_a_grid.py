"""Discrete Gaussian noise: sums on a grid, what rounding to it costs, and the engine with it.

Failure modes: 1 test_an_update_has_the_promised_deviation; 2 test_the_gradient_of_the_engine_is_on_the_grid,
test_an_update_has_the_promised_deviation; 15 test_noise_does_not_depend_on_the_split.

Statistical tests run under a fixed secret: they pass or fail for good, and correct noise fails under a random secret
with probability FALSE_ALARM each.
"""

import itertools
import math
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpshard import PrivacyEngine, QuantileTracking
from dpshard.accounting.releases import ROUNDING
from dpshard.errors import AccountingError, ConfigurationError
from dpshard.noise import keyed
from dpshard.noise.discrete_gaussian import DiscreteGaussian
from dpshard.noise.keyed import BLOCK, LIMIT, KeyedDiscreteGaussian, KeyedGaussian
from dpshard.randomness import RandomSource, derive_key
from tests.noise.sampled import sampled

SECRET = bytes(range(32))
DISCRETE = KeyedDiscreteGaussian(SECRET)
FALSE_ALARM = 1e-7


def steps_of(x, grid):
    """Return the integers k of values x = k * grid, as doubles; None if a value is off the grid."""
    k = np.rint(x.double().numpy() / grid)
    return k if np.array_equal(k * grid, x.double().numpy()) else None


@given(cuts=st.lists(st.integers(0, 600), max_size=6))
def test_noise_does_not_depend_on_the_split(cuts):
    bounds = [0, *sorted(cuts), 600]
    with (
        mock.patch.object(keyed, "BLOCK", 256),
        mock.patch.object(keyed, "SHORTEST_PIECE", 16),
        mock.patch.object(keyed, "LONGEST_PIECE", 64),
    ):
        whole = sampled(DISCRETE, 3, "w", 0, 600)
        shards = [sampled(DISCRETE, 3, "w", a, b) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(shards), whole)


def test_pieces_are_drawn_from_keys_of_their_own():
    """By definition pieces begin at 0, 1024, 2048, ..., 2^14, and then at multiples of 2^14."""
    n, step, name = 2**15 + 100, 4, "w"
    block = derive_key(SECRET, "noise", step, name, 0)
    bounds = [0, 2**10, 2**11, 2**12, 2**13, 2**14, 2**15, 3 * 2**14]
    pieces = [
        DiscreteGaussian().sample(b - a, RandomSource(derive_key(block, "piece", a)))
        for a, b in itertools.pairwise(bounds)
    ]
    expected = np.concatenate(pieces)[:n] * 2.0**-24
    assert np.array_equal(sampled(DISCRETE, step, name, 0, n, torch.float64).numpy(), expected)


def test_a_shard_draws_the_pieces_that_it_meets():
    with mock.patch.object(keyed, "derive_key", wraps=keyed.derive_key) as key:
        sampled(DISCRETE, 4, "w", BLOCK + 2**15, BLOCK + 2**15 + 1)
    assert [call.args[1:] for call in key.call_args_list] == [("piece", 2**15)]


@pytest.mark.parametrize(
    "other", [{"step": 1}, {"name": "v"}, {"start": BLOCK}, {"start": 2**14}, {"start": 2**13}], ids=str
)
def test_different_purposes_are_independent(other):
    asked = {"step": 0, "name": "w", "start": 0}
    one, two = (
        sampled(DISCRETE, a["step"], a["name"], a["start"], a["start"] + 2**13).numpy() for a in (asked, asked | other)
    )
    for a, b in ((one, two), (np.square(one), np.square(two))):
        assert stats.pearsonr(a, b).pvalue > FALSE_ALARM
    assert not np.isin(one, two).mean() > 0.1


def test_noise_does_not_depend_on_threads_and_layout():
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            target = torch.ones(BLOCK + 5, 4, dtype=torch.float64).t()  # enough for two threads
            results.append(DISCRETE.add_(target, step=0, name="w", std=2.0, start=5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)
    assert torch.equal(results[0].flatten(), 1 + 2 * sampled(DISCRETE, 0, "w", 5, 4 * BLOCK + 25, torch.float64))


@pytest.mark.parametrize("std", [0.37, 1e-12, 1e9])
def test_a_noisy_sum_is_a_point_of_the_grid(std):
    """By definition, in rational numbers: the nearest point of the grid, and whole steps from it."""
    grid, n = std * 2.0**-24, 3000
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 * std
    noisy = DISCRETE.add_(x.clone(), step=0, name="w", std=std)
    k = steps_of(noisy, grid)
    assert k is not None
    whole = np.rint(sampled(DISCRETE, 0, "w", 0, n, torch.float64).numpy() * 2.0**24)
    for value, total, drawn in zip(x.tolist()[:200], k[:200].tolist(), whole[:200].tolist(), strict=True):
        assert int(total - drawn) == round(Fraction(value) / Fraction(grid))
    assert np.array_equal(np.rint(x.numpy() / grid) + whole, k)
    for other in (KeyedGaussian(SECRET), KeyedGaussian(SECRET, secure=True)):
        assert steps_of(other.add_(x.clone(), step=0, name="w", std=std), grid) is None


def test_a_float32_sum_is_rounded_once_behind_the_addition():
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    wide = DISCRETE.add_(x.double(), step=0, name="w", std=0.3)
    assert torch.equal(DISCRETE.add_(x.clone(), step=0, name="w", std=0.3), wide.float())


ELEMENT = st.one_of(
    st.integers(-4, 4).map(lambda k: k / 2),  # half steps, which rounding may separate
    st.floats(-1e6, 1e6),
    st.sampled_from([LIMIT - 1, LIMIT, LIMIT + 1, -LIMIT, 2 * LIMIT, 1e30]),
)


@given(
    x=st.lists(ELEMENT, min_size=1, max_size=8),
    change=st.lists(st.floats(-3, 3), min_size=8, max_size=8),
    std=st.sampled_from([1.0, 0.3, 7e-5]),
)
def test_rounding_moves_sums_apart_by_no_more_than_is_charged(x, change, std):
    grid, d = std * 2.0**-24, len(x)
    sums = [torch.tensor(x, dtype=torch.float64) * grid]
    sums.append(sums[0] + torch.tensor(change[:d], dtype=torch.float64) * grid)
    distance = float((sums[0] - sums[1]).norm())
    one, two = (steps_of(DISCRETE.add_(s.clone(), step=0, name="w", std=std), grid) for s in sums)
    assert np.linalg.norm(one - two) <= distance / grid * (1 + 1e-12) + ROUNDING * math.sqrt(d)


def test_rounding_does_move_sums_apart():
    """Otherwise nothing would need accounting: near the middle of a step, a tiny change moves one step."""
    grid = 2.0**-24
    d = 100
    one, two = (
        DISCRETE.add_(torch.full((d,), x * grid, dtype=torch.float64), step=0, name="w", std=1.0)
        for x in (0.499999, 0.500001)
    )
    assert float((one - two).norm()) / grid == pytest.approx(math.sqrt(d))


def test_sums_beyond_the_limit_are_cut_off_and_a_nan_stays_one():
    x = torch.tensor([1e300, -1e300, math.inf, -math.inf, math.nan, 1.0], dtype=torch.float64)
    noisy = DISCRETE.add_(x.clone(), step=0, name="w", std=1e-10)
    k = np.rint((noisy[:4] / (1e-10 * 2.0**-24)).numpy())
    assert (np.abs(np.abs(k) - LIMIT) < 2.0**28).all()
    assert (np.sign(k) == [1, -1, 1, -1]).all()
    assert torch.isnan(noisy).tolist() == [False, False, False, False, True, False]


def test_a_grid_that_no_double_holds_is_refused():
    with pytest.raises(ConfigurationError, match=r"std=1e-305 .*max_grad_norm"):
        DISCRETE.add_(torch.zeros(3), step=0, name="w", std=1e-305)
    assert torch.equal(DISCRETE.add_(torch.ones(3), step=0, name="w", std=0.0), torch.ones(3))


# --- the engine -----------------------------------------------------------------------------------------------------


def engine_on(model, **options):
    defaults = {"batch_size": 8, "sample_size": 64, "steps": 100, "noise_multiplier": 0.7, "max_grad_norm": 3.0}
    engine = PrivacyEngine(
        model, **{**defaults, "verify": False, "noise": "discrete-gaussian", "accountant": "rdp", **options}
    )
    engine._secret = SECRET
    return engine


def small_model(width=6, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def released(model, engine, rows, weight=1.0):
    (model(rows).square().sum(1) * weight).mean().backward()
    engine.privatize()
    found = 8 * torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
def test_the_gradient_of_the_engine_is_on_the_grid(style):
    rows, found = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), {}
    for kind in ("discrete-gaussian", "gaussian"):
        model = small_model()
        found[kind] = released(model, engine_on(model, noise=kind, clipping_style=style), rows)
    assert steps_of(found["discrete-gaussian"], 0.7 * 3.0 * 2.0**-24) is not None
    assert steps_of(found["gaussian"], 0.7 * 3.0 * 2.0**-24) is None


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_an_update_has_the_promised_deviation():
    model = small_model(8000, torch.float32)
    noise_n = released(model, engine_on(model), torch.zeros(8, 4), weight=0.0).double() / (0.7 * 3.0)
    lo, hi = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(noise_n))
    assert lo <= float(noise_n.square().sum()) <= hi
    assert stats.kstest(noise_n.numpy(), "norm").pvalue > FALSE_ALARM


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_the_engine_counts_all_elements_and_says_what_the_noise_is():
    model = small_model()
    engine = engine_on(model, noise_multiplier=None, target_epsilon=2.0)
    elements = sum(p.numel() for p in model.parameters())
    assert (engine.mechanism.noise, engine.mechanism.discretized_elements) == ("discrete-gaussian", elements)
    released(model, engine, torch.ones(5, 4, dtype=torch.float64))
    (span,) = engine.state_dict()["ledger"]["spans"]
    assert span["release"]["discretized_elements"] == elements
    assert "1 releases with discrete Gaussian noise under Poisson sampling" in engine.statement()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accountant": "pld"}, AccountingError, "'pld' cannot analyse discrete.*accountant='rdp'"),
        ({"accountant": "gdp"}, AccountingError, "'gdp' cannot analyse discrete.*accountant='rdp'"),
        ({"accountant": "pld", "noise_multiplier": None, "target_epsilon": 1.0}, AccountingError, "'pld' cannot"),
        ({"max_batch_size": 20}, AccountingError, "drop max_batch_size=20"),
        ({"adaptive_clipping": QuantileTracking()}, ConfigurationError, "adaptive_clipping.*fix the thresholds"),
        ({"noise": "laplace"}, ConfigurationError, r"noise='laplace' is unknown.*\['gaussian', 'discrete-gaussian'\]"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_what_is_not_proved_is_refused(options, error, message):
    model = small_model()
    with pytest.raises(error, match=message):
        engine_on(model, **options)
    engine_on(model)  # the refused one left no trace


def test_no_device_draws_it_by_the_element():
    """GPUs draw Gaussian noise, not discrete noise."""
    for device in ("cpu", "cuda"):
        assert DISCRETE._draws_on_cpu(torch.device(device))
    assert not KeyedGaussian(SECRET)._draws_on_cpu(torch.device("cuda"))
