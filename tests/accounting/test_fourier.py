"""The composition of privacy losses: its bound of rounding against exact and against longer arithmetic.

Failure modes: 20 test_epsilon_is_a_bound_at_every_delta, test_rounding_is_bounded_and_small.
"""

import math
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions
from scipy import fft

from dpshard.accounting import Release, composition, fourier
from dpshard.accounting.fourier import SINGLE_ABSOLUTE, SINGLE_ERROR, Losses
from dpshard.errors import AccountingError


def exact_convolution(losses, count):
    """Return the exact masses of the sum, and its first place."""
    masses = np.array([Fraction(mass) for mass in losses.masses], dtype=object)
    total = masses
    for _ in range(count - 1):
        total = np.convolve(total, masses)
    return total, losses.first * count


def exact_delta(total, first, interval, epsilon):
    with mpmath.workdps(60):
        start = max(0, math.floor(epsilon / interval) + 1 - first)
        terms = (
            -mpmath.expm1(mpmath.mpf(epsilon) - mpmath.mpf(interval) * (first + i))
            * mpmath.mpf(total[i].numerator)
            / total[i].denominator
            for i in range(start, len(total))
        )
        return mpmath.fsum(term for term in terms if term > 0)


@pytest.mark.parametrize(("sigma", "q", "steps"), [(0.7, 0.02, 6), (2.0, 0.5, 12)])
@pytest.mark.parametrize("way", [0, -1])
def test_epsilon_is_a_bound_at_every_delta(sigma, q, steps, way):
    """Down to deltas where a plain transform in doubles, which errs by 1e-16, finds nothing."""
    step = distributions.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=0.1)
    losses = fourier.directions(step)[way]
    total, first = exact_convolution(losses, steps)
    for delta in (0.5, 1e-3, 1e-6, 1e-10, 1e-14, *([1e-18] if way == 0 else [])):
        epsilon = fourier.epsilon([(losses, steps)], delta)
        exact, nearby = (exact_delta(total, first, 0.1, e) + steps * losses.infinite for e in (epsilon, epsilon - 1e-6))
        assert exact <= delta
        assert epsilon == 0 or nearby > 0.99 * delta - 2 * steps * SINGLE_ABSOLUTE


def longer(masses, count):
    """Return the convolution in long doubles."""
    base, product = fft.rfft(masses.astype(np.longdouble)), np.longdouble(1)
    while count:
        product, base, count = product * base if count & 1 else product, base * base, count >> 1
    return fft.irfft(product, len(masses))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="long doubles are no longer than doubles here")
@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [(0.614, 5.7e-5, 100_000, 1.1e-10), (5.0, 0.3, 3000, 1e-13)])
def test_rounding_is_bounded_and_small(sigma, q, steps, delta):
    step = distributions.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-3)
    losses = fourier.directions(step)[0]
    tilt, first, length, order = fourier._window([(losses, steps)], delta)
    composed = fourier._compose([(losses, steps)], tilt, first, length, order)
    masses, _, _ = losses.tilted(tilt, length, fourier._gap(losses, order))
    errors = composed.tilted - np.roll(longer(masses, steps), -(first % length))
    assert 1e-4 * composed.error < np.linalg.norm(errors) < composed.error
    epsilon = fourier.epsilon([(losses, steps)], delta)
    charged = composed.error * float(composed._norms[np.searchsorted(composed.losses, epsilon)])
    assert charged + composed.above < 1e-3 * delta
    assert composed.relative < 1e-5


def test_mass_above_the_window_is_charged():
    losses = Losses(1.0, -1, np.array([0.1, 0.4, 0.5]), 0.0)
    composed = fourier._compose([(losses, 40)], 0.0, 0, 16, 1.0)
    total, first = exact_convolution(losses, 40)
    assert sum(total[16 - first :]) > 0.1  # not in the window
    for epsilon in (0.0, 3.5, 12.5):
        assert composed.delta(epsilon) >= exact_delta(total, first, 1.0, epsilon)


def test_infinite_losses_are_charged():
    losses = Losses(0.5, 0, np.array([1 - 1e-6]), 1e-6)
    assert fourier.epsilon([(losses, 10)], 0.99e-5) == math.inf
    assert fourier.epsilon([(losses, 10)], 1.01e-5) == 0


def test_distinct_steps_compose():
    """The order and the grouping of steps change nothing."""
    few, many = (
        fourier.directions(composition._single(Release(s, 0.05, 1000), "add-or-remove-one", 1e-3))[0]
        for s in (1.0, 2.0)
    )
    whole = fourier.epsilon([(few, 30), (many, 50)], 1e-9)
    assert fourier.epsilon([(many, 20), (few, 30), (many, 30)], 1e-9) == pytest.approx(whole, rel=1e-9)
    assert fourier.epsilon([(few, 30)], 1e-9) < whole


def exact_step(q, sigma, epsilon, added):
    """Delta of one step of a sampled Gaussian, by 50 digits."""
    q, sigma, epsilon = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(epsilon)
    mixed = mpmath.exp(-epsilon if added else epsilon) - 1 + q
    if mixed <= 0:
        return 0 if added else 1 - mpmath.exp(epsilon)
    sign = -1 if added else 1
    edge = sigma**2 * mpmath.log(mixed / q) + mpmath.mpf(1) / 2
    without, shifted = (mpmath.erfc(sign * (edge - mean) / sigma / mpmath.sqrt(2)) / 2 for mean in (0, 1))
    with_it = (1 - q) * without + q * shifted
    return without - mpmath.exp(epsilon) * with_it if added else with_it - mpmath.exp(epsilon) * without


@pytest.mark.parametrize(
    ("sigma", "q", "interval"),
    [
        (0.614, 5.7e-5, 1e-4),
        (1.0, 1e-3, 1e-4),
        (5.0, 0.5, 1e-4),
        (100.0, 1.0, 1e-4),
        (30.0, 1e-4, 1e-5),
        (0.5, 0.3, 1e-3),
    ],
)
def test_masses_of_one_step_are_as_exact_as_assumed(sigma, q, interval):
    """[Note: Tilted composition] assumes this of dp-accounting."""
    step = distributions.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)
    with mpmath.workdps(50):
        for added, losses in enumerate(fourier.directions(step)):
            for k in np.linspace(0, len(losses.masses) - 2, 25).astype(int):
                distances = interval * np.arange(1, len(losses.masses) - k)
                found = math.fsum(-np.expm1(-distances) * losses.masses[k + 1 :]) + losses.infinite
                exact = exact_step(q, sigma, mpmath.mpf(interval) * int(losses.first + k), added)
                assert exact <= mpmath.mpf(found) + SINGLE_ERROR * losses.masses[k:].sum() + SINGLE_ABSOLUTE


def test_another_dp_accounting_is_refused():
    with pytest.raises(AccountingError, match=r"dp-accounting 0\.6"):
        fourier.directions(SimpleNamespace())
