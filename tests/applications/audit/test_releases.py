"""The audit of releases finds faults of sums, noise and batches, planted in the real engine, and passes sound ones.

Failure modes: 1 test_a_planted_fault_is_found[divide_by_realised_size]; 2 [double_a_threshold]; 5
[count_one_row_of_padding]; 6 [leave_small_parameters_out_of_norms]; 9 [silence]; 10 [halve_precision]; 19
[add_stale_gradients]; 20 [fix_the_batch_size], [shuffle]; 26 [reuse_noise], [draw_by_a_public_seed],
[share_noise_between_parameters].

Run secrets are fixed, so the tests pass or fail for good; under random ones a sound engine fails with FALSE_ALARM, and
one of many sound engines with that times their number.
"""

import hashlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from dpshard import BandedInverse, BandMF, QuantileTracking
from dpshard.applications.audit import FALSE_ALARM, audit_releases
from dpshard.applications.audit.draws import draw_findings
from dpshard.applications.audit.noise import Finding, NoiseTests, likeliest_fault, log_tail_of_products
from dpshard.errors import ConfigurationError
from tests.applications.audit import faults

STEPS = 64


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch):
    """Give each engine a new but reproducible secret, because the audit needs two different engines."""
    numbers = itertools.count()
    monkeypatch.setattr("dpshard.engine.new_run_secret", lambda: hashlib.sha256(str(next(numbers)).encode()).digest())


def classifier(dropout=0.0):
    """Return a network with two weights of one shape, and small and large candidates."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6))
        x = torch.randn(16, 6) * torch.tensor([0.0, 0.3, 1.0, 3.0]).repeat(4)[:, None]
    return model, x, torch.arange(16) % 6, lambda scores, y: F.cross_entropy(scores, y, reduction="none")


PLANTED = {
    # Noise
    "weaken_noise": partial(faults.weaken_noise, by=1.1),
    "reuse_noise": partial(faults.reuse_noise, steps=2),
    "divide_noise_twice": faults.divide_noise_twice,
    "silence": partial(faults.silence, of="3.bias"),
    "silence_a_layer": partial(faults.silence, of="3.weight"),
    "silence_tail": faults.silence_tail,
    "weaken_element": faults.weaken_element,
    "halve_precision": faults.halve_precision,
    "draw_uniform": faults.draw_uniform,
    "share_noise_between_parameters": faults.share_noise_between_parameters,
    "share_noise_between_rows": faults.share_noise_between_rows,
    "mix_in_noise_of_the_step_before": faults.mix_in_noise_of_the_step_before,
    "draw_by_a_public_seed": faults.draw_by_a_public_seed,
    # Sums
    "drop_clipping": partial(faults.drop_clipping, of="3.weight"),
    "leave_small_parameters_out_of_norms": faults.leave_small_parameters_out_of_norms,
    "double_a_threshold": faults.double_a_threshold,
    "count_one_row_of_padding": faults.count_one_row_of_padding,
    "add_stale_gradients": faults.add_stale_gradients,
    "average_before_the_noise": faults.average_before_the_noise,
    "divide_by_realised_size": faults.divide_by_realised_size,
    # Samples
    "draw_twice_as_often": faults.draw_twice_as_often,
    "draw_again_at_the_next_step": faults.draw_again_at_the_next_step,
    "fix_the_batch_size": faults.fix_the_batch_size,
    "pair_samples": faults.pair_samples,
    "shuffle": faults.shuffle,
}
GROUPED = {"double_a_threshold": {"clipping_style": "layer-wise"}}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(monkeypatch, name):
    PLANTED[name](monkeypatch)
    # Verification would notice some faults before the first step.
    assert audit_releases(*classifier(), steps=STEPS, verify=False, **GROUPED.get(name, {})).fault is not None


SOUND = [
    {},
    {"clipping_style": "layer-wise", "clipping_fn": "abadi", "secure_mode": True},
    {"clipping_style": "param-wise", "clipping_fn": "global", "loss_reduction": "sum"},
    {"adaptive_clipping": QuantileTracking(0.5), "clipping_style": "layer-wise"},
    {"noise": "discrete-gaussian", "accountant": "rdp"},
]


CORRELATED = {"sampling": "fixed-order", "noise_correlation": BandedInverse(bands=3)}
IN_GROUPS = {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=5)}
BUFFERED = {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=5, buffers=True)}
IN_BINS = {"sampling": "balls-in-bins", "noise_correlation": BandedInverse(bands=3)}
JOINED = [CORRELATED, IN_GROUPS, {"sampling": "balls-in-bins"}, IN_BINS]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("drop_a_weight", CORRELATED),
        ("redraw_under_another_key", CORRELATED),
        ("come_once_too_often", CORRELATED),
        pytest.param("drop_a_weight", IN_GROUPS, marks=pytest.mark.exhaustive),
        pytest.param("redraw_under_another_key", IN_GROUPS, marks=pytest.mark.exhaustive),
        pytest.param("forget_a_buffer", BUFFERED, marks=pytest.mark.exhaustive),
        ("draw_from_all_groups", IN_GROUPS),
        ("keep_the_bins", {"sampling": "balls-in-bins"}),
        ("change_the_bins", IN_BINS),
    ],
)
def test_a_fault_of_correlated_noise_or_of_its_sampling_is_found(monkeypatch, name, options):
    getattr(faults, name)(monkeypatch)
    assert audit_releases(*classifier(), steps=STEPS, verify=False, **options).fault is not None


@pytest.mark.parametrize(
    "options",
    [*SOUND, *JOINED, pytest.param(BUFFERED, marks=pytest.mark.exhaustive)],
    ids="default secure global adaptive discrete correlated groups bins correlated-bins buffers".split(),
)
def test_a_sound_engine_passes(options):
    model, x, y, loss = classifier()
    if options.get("loss_reduction") == "sum":
        options = options | {"micro_batch_size": 2}
    audit = audit_releases(model, x, y, loss, steps=STEPS, **options)
    assert audit.fault is None
    assert (audit.samples, audit.elements, audit.steps) == (8, 84, STEPS)


@pytest.mark.parametrize("silent", [None, "3.bias"])
def test_noise_is_tested_where_gradients_are_random(monkeypatch, silent):
    if silent:
        faults.silence(monkeypatch, silent)
    audit = audit_releases(*classifier(dropout=0.5), steps=STEPS)
    assert audit.samples == 0
    assert (audit.fault is not None) == bool(silent)


def test_seeds_of_the_script_are_given_back():
    model, x, y, loss = classifier()
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    audit_releases(model, x, y, loss, steps=16)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    loss(model(x), y).mean().backward()  # an ordinary model again


def test_what_cannot_be_audited_is_refused():
    model, x, y, loss = classifier()
    with pytest.raises(ConfigurationError, match="steps=4"):
        audit_releases(model, x, y, loss, steps=4)
    with pytest.raises(ConfigurationError, match="No candidate"):
        audit_releases(model, x, y, lambda scores, y: 0 * loss(scores, y))


# --- the tests themselves --------------------------------------------------------------------------------------------


def test_p_values_are_as_small_as_they_say_and_no_smaller():
    """In 100 simulated sound audits, p-values below p occur with probability at most p, for p = 1/10."""
    rng, below, audits = np.random.default_rng(0), 0, 100
    for _ in range(audits):
        tests = NoiseTests({"a": 40, "b": 7, "c": 1})
        for _ in range(2):
            for _ in range(15):
                tests.see({"a": rng.normal(size=40), "b": rng.normal(size=7), "c": rng.normal(size=1)}, alone=True)
            tests.next_engine()
        drawn = [rng.random((15, 4)) < 0.25 for _ in range(2)]
        below += likeliest_fault([*tests.findings(), *draw_findings(drawn, 0.25)], 0.1) is not None
    assert below <= stats.binom.isf(1e-6, audits, 0.1)


@pytest.mark.parametrize("m", [1, 5, 100])
def test_the_tail_of_products_is_bounded(m):
    rng = np.random.default_rng(1)
    sums = np.abs((rng.normal(size=(50_000, m)) * rng.normal(size=(50_000, m))).sum(1))
    for s in (1.0, 3.0, 3 * m**0.5, 5 * m**0.5):
        bound = np.exp(log_tail_of_products(np.array([s]), np.array([float(m)])))[0]
        assert (sums >= s).mean() <= bound + 5 * np.sqrt(bound / len(sums))
    assert log_tail_of_products(np.array([100.0]), np.array([100.0]))[0] < np.log(FALSE_ALARM)


def test_of_equally_clear_faults_the_first_is_named():
    found = [Finding("sum", -5000.0), Finding("noise", -np.inf), Finding("draws", 0.0)]
    assert likeliest_fault(found, FALSE_ALARM).what == "sum"
    assert likeliest_fault(found[2:], FALSE_ALARM) is None
