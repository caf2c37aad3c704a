"""The best of a random number of private runs, against its exact distribution.

Failure mode: 25 (hyper-parameter search is charged).
"""

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dpshard.accounting import Search, compute_epsilon
from dpshard.errors import AccountingError, ConfigurationError
from tests.accounting.ledgers import run_epsilon, run_of, run_sigma, run_steps

DELTA = 1e-5
RUN = {"sample_size": 60_000, "target_delta": DELTA, "accountant": "rdp"}
SEARCHES = [Search(10), Search(1.5), Search(10, "logarithmic"), Search(10, "poisson"), Search(1, "poisson")]


def generating_slope(search):
    """x -> f'(x), where f(x) = E[x^K] and K is the number of runs."""
    if search.distribution == "poisson":
        return lambda x: search.mean_runs * np.exp(search.mean_runs * (x - 1))
    if search.distribution == "geometric":  # P(K = k) = (1 - p)^(k-1) p
        p = 1 / search.mean_runs
        return lambda x: p / (1 - (1 - p) * x) ** 2
    # P(K = k) = -1 / log(1 - r) r^k / k; bisection matches the mean -1 / log(1 - r) r / (1 - r)
    lo, hi = 1e-9, 1 - 1e-12
    for _ in range(200):
        r = (lo + hi) / 2
        lo, hi = (r, hi) if -r / ((1 - r) * np.log1p(-r)) < search.mean_runs else (lo, r)
    return lambda x: -r / ((1 - r * x) * np.log1p(-r))


def exact_epsilon(search, sigma):
    """Return epsilon of the largest of K releases N(0, sigma^2), or N(1, sigma^2) on the neighbour, by its density."""
    y = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    slope = generating_slope(search)
    p, q = (slope(d.cdf(y)) * d.pdf(y) for d in (stats.norm(0, sigma), stats.norm(1, sigma)))
    lo, hi = 0.0, 60.0
    for _ in range(60):
        middle = (lo + hi) / 2
        delta = max(np.trapezoid(np.clip(a - np.exp(middle) * b, 0, None), y) for a, b in ((p, q), (q, p)))
        lo, hi = (middle, hi) if delta > DELTA else (lo, middle)
    return hi


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_epsilon_of_a_search_covers_its_exact_distribution(search, sigma):
    """The worst mechanism for a search: the release itself is the score."""
    one = {"sample_size": 100, "target_delta": DELTA, "accountant": "rdp", "noise_multiplier": sigma}
    assert run_epsilon([(100, 1)], **one, search=search) >= exact_epsilon(search, sigma)


def test_a_search_costs_more_than_a_run_and_less_than_its_runs_together():
    phases, sigma = [(256, 1000)], {"noise_multiplier": 1.1}
    one = run_epsilon(phases, **sigma, **RUN)
    together = run_epsilon([(256, 100 * 1000)], **sigma, **RUN)
    found = [run_epsilon(phases, **sigma, **RUN, search=Search(mean)) for mean in (1.5, 10, 100)]
    assert one < found[0] < found[1] < found[2] < together


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_a_search_of_one_setting_is_that_of_dp_accounting(search):
    shape = {"poisson": np.inf, "geometric": 1.0, "logarithmic": 0.0}[search.distribution]
    run = SelfComposedDpEvent(PoissonSampledDpEvent(256 / 60_000, GaussianDpEvent(1.1)), 1000)
    theirs = RdpAccountant().compose(RepeatAndSelectDpEvent(run, float(search.mean_runs), shape)).get_epsilon(DELTA)
    ours = run_epsilon([(256, 1000)], noise_multiplier=1.1, **RUN, search=search)
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_search_over_noise_or_batches_costs_its_worst_candidate():
    def candidate(batch_size, steps, sigma):
        return run_of([(batch_size, steps)], noise_multiplier=sigma, sample_size=RUN["sample_size"]).releases()

    def epsilon(batch_size, steps, sigma, others=()):
        search = Search(10, others=tuple(candidate(*other) for other in others))
        return run_epsilon([(batch_size, steps)], noise_multiplier=sigma, **RUN, search=search)

    mild, noisy, wide = (256, 1000, 1.1), (256, 1000, 2.0), (2000, 30, 1.1)
    assert epsilon(*noisy, [mild]) == epsilon(*mild, [noisy]) == epsilon(*mild)
    # Neither is the worst at every order, so both together cost more than either.
    assert epsilon(*mild, [wide]) == epsilon(*wide, [mild]) >= max(epsilon(*mild), epsilon(*wide))
    assert epsilon(*mild, [(256, 1000, 0.0)]) == np.inf
    idle = compute_epsilon((), DELTA, "rdp", Search(10, others=(candidate(*mild),)))
    assert idle == epsilon(*mild)  # the first candidate releases nothing


@pytest.mark.parametrize("steps", [-1, 1.5])
def test_a_count_that_is_none_is_refused(steps):
    ((release, _),) = run_of([(256, 10)], noise_multiplier=1.0, sample_size=1000).releases()
    with pytest.raises(ConfigurationError, match="a count is a whole number"):
        compute_epsilon(((release, steps),), DELTA)


def test_noise_and_steps_keep_a_search_within_its_budget():
    search, budget = Search(20), {"target_epsilon": 3.0}
    phases = [(128, 300), (256, 300)]
    sigma = run_sigma(phases, **budget, **RUN, search=search)
    assert run_epsilon(phases, noise_multiplier=sigma, **RUN, search=search) <= 3.0
    assert run_epsilon(phases, noise_multiplier=sigma * (1 - 1e-4), **RUN, search=search) > 3.0
    steps = run_steps(256, noise_multiplier=2.0, **budget, **RUN, search=search)
    assert run_epsilon([(256, steps)], noise_multiplier=2.0, **RUN, search=search) <= 3.0
    assert run_epsilon([(256, steps + 1)], noise_multiplier=2.0, **RUN, search=search) > 3.0


@pytest.mark.parametrize("accountant", ["pld", "gdp"])
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_other_accountants_refuse_a_search(accountant):
    with pytest.raises(AccountingError, match="Take accountant='rdp'"):
        run_epsilon([(256, 10)], noise_multiplier=1.0, **RUN | {"accountant": accountant}, search=Search(10))


@pytest.mark.parametrize(
    "wrong", [(0.5,), (float("nan"),), (float("inf"),), (1,), (0.9, "poisson"), (10, "uniform"), ("a",)]
)
def test_impossible_searches_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        Search(*wrong)


def test_a_number_of_runs_is_no_search():
    with pytest.raises(ConfigurationError, match="pass a Search"):
        run_epsilon([(256, 10)], noise_multiplier=1.0, **RUN, search=10)
