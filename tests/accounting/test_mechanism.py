"""A mechanism has its releases, and calibration returns one."""

import subprocess
import sys
from dataclasses import replace

import pytest

from dpshard.accounting import Release, SampledMechanism, calibrate, compute_epsilon
from dpshard.config import BatchSchedule
from dpshard.errors import ConfigurationError
from tests.accounting.ledgers import run_of

RUN = run_of([(50, 3), (100, 2), (50, 1)], sample_size=1000, noise_multiplier=1.5)


def test_releases_are_those_of_the_steps():
    facts = {"max_batch_size": 120, "quantile_counts": 2, "discretized_elements": 7}
    run = replace(RUN, **facts)
    small, large = (Release(1.5, q, 1000, **facts) for q in (0.05, 0.1))
    assert [run.release(step) for step in range(8)] == [small] * 3 + [large] * 2 + [small] * 3
    assert run.releases() == run.releases(99) == ((small, 4), (large, 2))
    assert run.releases(4) == ((small, 3), (large, 1))


def test_nothing_is_released_without_steps_or_before_the_noise_is_known():
    with pytest.raises(ConfigurationError, match="no steps"):
        replace(RUN, schedule=BatchSchedule(())).releases()
    with pytest.raises(ConfigurationError, match="noise_multiplier=nan"):
        SampledMechanism(schedule=RUN.schedule, sample_size=1000).releases()


def test_calibration_changes_the_noise_and_nothing_else():
    found = calibrate(RUN, target_epsilon=1.0, target_delta=1e-5, accountant="rdp")
    assert replace(found, noise_multiplier=1.5) == RUN
    assert 0.99 < compute_epsilon(found.releases(), 1e-5, "rdp") <= 1.0


def test_what_computes_bounds_is_imported_when_one_is_asked_for():
    code = (
        "import sys; from dpshard.accounting import PrivacyLedger, Release; ledger = PrivacyLedger()\n"
        "ledger.record(Release(1.0, 0.1, 100))\n"
        "assert not {'torch', 'scipy', 'dp_accounting'} & sys.modules.keys()\n"
        "assert ledger.epsilon(1e-5) > 0 and 'dp_accounting' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
