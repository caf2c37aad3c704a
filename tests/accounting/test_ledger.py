"""The ledger: what was released, what it costs, what may still be released.

Failure modes: 20 test_relations_are_named; 21 test_each_release_is_counted; 22 test_epsilon_is_pure;
24 test_a_ledger_survives_a_checkpoint, test_damaged_ledgers_are_refused, test_affords_says_when_to_stop.
"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpshard.accounting import (
    PrivacyLedger,
    Release,
)
from dpshard.accounting import (
    ledger as ledger_module,
)
from dpshard.errors import AccountingError, CheckpointError, ConfigurationError
from tests.accounting.ledgers import BUDGET, RELEASE, ledger_of, run_epsilon, run_sigma, run_steps


def test_each_release_is_counted():
    ledger = PrivacyLedger()
    assert (ledger.steps, ledger.epsilon(1e-5)) == (0, 0.0)
    spent = []
    for _ in range(3):
        ledger.record(RELEASE)
        spent.append(ledger.epsilon(1e-5))
    assert ledger.steps == 3
    assert 0 < spent[0] < spent[1] < spent[2]


def test_epsilon_is_pure():
    ledger = ledger_of(RELEASE, RELEASE)
    before = ledger.state_dict()
    assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5) < ledger.epsilon(1e-7)
    assert ledger.allows(RELEASE, **BUDGET)
    assert ledger.state_dict() == before


def test_no_noise_no_privacy():
    bare = Release(0.0, 0.01, 10_000)
    ledger = ledger_of(RELEASE, bare)
    assert ledger.epsilon(1e-5) == math.inf
    assert "not private" in ledger.statement(1e-5)
    assert not PrivacyLedger().allows(bare, **BUDGET)


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_a_cap_needs_pld(accountant):
    capped = Release(1.0, 0.01, 10_000, max_batch_size=160)
    ledger = PrivacyLedger(accountant)
    for refused in (
        lambda: ledger.record(capped),
        lambda: ledger.allows(capped, **BUDGET),
        lambda: run_sigma([(100, 10)], sample_size=10_000, max_batch_size=160, **BUDGET, accountant=accountant),
    ):
        with pytest.raises(AccountingError, match="take accountant='pld'"):
            refused()
    assert ledger.steps == 0


def test_relations_are_named():
    plain, capped = ledger_of(RELEASE), ledger_of(RELEASE, Release(1.0, 0.01, 10_000, max_batch_size=160))
    assert (plain.relation, capped.relation) == ("add-or-remove-one", "replace-special")
    assert "add-or-remove-one" in plain.statement(1e-5)
    assert "replace-special" in capped.statement(1e-5)
    for ledger in (plain, capped):
        assert "for one sample of N = 10000, " in ledger.statement(1e-5)
        assert "neighbours (zero-out at fixed N)" in ledger.statement(1e-5)
    assert plain.statement(1e-5, generator="Gaussian from AES-256").endswith(" noise: Gaussian from AES-256)")


def test_before_the_first_release_a_statement_names_the_relation_of_the_plan():
    capped = Release(1.0, 0.01, 10_000, max_batch_size=160)
    assert "replace-special" in PrivacyLedger().statement(1e-5, plan=((capped, 100),))


def test_statements_tell_batches_that_the_script_drew():
    ledger = ledger_of(RELEASE)
    assert "script" not in ledger.statement(1e-5)
    ledger.record(RELEASE, unverified_sampling=True)
    resumed = PrivacyLedger()
    resumed.load_state_dict(ledger.state_dict())
    for told in (ledger, resumed):
        assert "2 releases under Poisson sampling (1 of them of batches that the script fed" in told.statement(1e-5)


def test_statements_round_up():
    ledger = ledger_of(*[RELEASE] * 1000)
    assert "epsilon = 1.8283 at delta = 1e-05" in ledger.statement(1e-5)


@pytest.mark.parametrize("planned", [True, False])
def test_affords_says_when_to_stop(planned):
    budget = {"target_epsilon": 0.9, "target_delta": 1e-5}
    fitting = run_steps(100, noise_multiplier=1.0, sample_size=10_000, **budget, accountant="rdp")
    plan = ((RELEASE, fitting),) if planned else ()
    ledger = PrivacyLedger("rdp")
    while ledger.allows(RELEASE, **budget, plan=plan):
        ledger.record(RELEASE)
    assert ledger.steps == fitting
    assert ledger.epsilon(1e-5) <= 0.9 < ledger_of(*[RELEASE] * (fitting + 1), accountant="rdp").epsilon(1e-5)


def test_affords_minds_releases_off_the_plan():
    ledger, costly = PrivacyLedger("rdp"), Release(0.5, 0.5, 10_000)
    assert ledger.allows(RELEASE, **BUDGET, plan=((RELEASE, 20),))
    assert not ledger.allows(costly, **BUDGET, plan=((RELEASE, 20),))
    ledger.record(costly)
    assert not ledger.allows(RELEASE, **BUDGET, plan=((RELEASE, 20),))
    fresh = PrivacyLedger("rdp")
    assert fresh.allows(RELEASE, **BUDGET)
    fresh.load_state_dict(ledger.state_dict())
    assert not fresh.allows(RELEASE, **BUDGET)


def test_affords_is_cheap(monkeypatch):
    evaluations = []
    epsilon = ledger_module.epsilon_of
    monkeypatch.setattr(ledger_module, "epsilon_of", lambda *args: evaluations.append(args) or epsilon(*args))
    ledger, plan = PrivacyLedger("rdp"), ((RELEASE, 100), (Release(1.0, 0.02, 10_000), 100))
    for release, count in plan:
        for _ in range(count):
            assert ledger.allows(release, target_epsilon=5.0, target_delta=1e-5, plan=plan)
            ledger.record(release)
    assert len(evaluations) == 1
    last = plan[-1][0]
    resumed = PrivacyLedger("rdp")
    for release in [plan[0][0]] * 100 + [last] * 50:
        resumed.record(release)
    for _ in range(50):
        assert resumed.allows(last, target_epsilon=epsilon(plan, 1e-5, "rdp"), target_delta=1e-5, plan=plan)
        resumed.record(last)
    assert len(evaluations) == 2
    ledger = PrivacyLedger("rdp")
    for _ in range(5000):
        assert ledger.allows(RELEASE, target_epsilon=20.0, target_delta=1e-5)
        ledger.record(RELEASE)
    assert len(evaluations) < 10


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(1e-6, 1), st.none() | st.integers(1, 9)), max_size=5))
def test_a_ledger_survives_a_checkpoint(entries):
    ledger = ledger_of(*[Release(sigma, q, 1000, cap) for sigma, q, cap in entries for _ in range(2)])
    restored = PrivacyLedger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.steps == 2 * len(entries)
    assert restored.state_dict() == ledger.state_dict()


def test_what_a_ledger_has_recorded_stays_beside_what_it_loads():
    ledger = ledger_of(RELEASE, RELEASE)
    ledger.charge(1, RELEASE, unverified_sampling=True)
    ledger.load_state_dict(ledger_of(RELEASE).state_dict())
    assert (ledger.steps, ledger.releases) == (1, 4)
    assert "4 releases (3 of them of steps that were taken again" in ledger.statement(1e-5)
    ledger.take_uncharged()
    assert (ledger.steps, ledger.releases) == (2, 4)
    fresh = PrivacyLedger()
    fresh.load_state_dict(ledger.state_dict())
    assert fresh.state_dict() == ledger.state_dict()


def test_a_ledger_that_was_in_a_state_before_counts_it_once():
    ledger = ledger_of(RELEASE)
    before = ledger.state_dict()
    ledger.record(RELEASE)
    ledger.load_state_dict(before, visited=True)
    assert (ledger.steps, ledger.releases) == (1, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("spans"),
        lambda state: state.pop("run"),
        lambda state: state.update(run=None),
        lambda state: state.pop("steps"),
        lambda state: state.update(steps=3),
        lambda state: state.update(steps=-1),
        lambda state: state.update(spans=None),
        lambda state: state["spans"].clear(),
        lambda state: state["spans"][0].pop("stop"),
        lambda state: state["spans"][0].update(start=1),
        lambda state: state["spans"][0].update(stop=0),
        lambda state: state["spans"][0].update(stop="2"),
        lambda state: state["spans"][0].update(run="another"),
        lambda state: state["spans"][0].update(unverified_sampling=1),
        lambda state: state["spans"][0]["release"].update(noise_multiplier=math.nan),
        lambda state: state["spans"][0]["release"].update(sampling_probability=None),
        lambda state: state["spans"][0]["release"].update(surprise=1),
    ],
)
def test_damaged_ledgers_are_refused(damage):
    state = ledger_of(RELEASE, RELEASE).state_dict()
    damage(state)
    ledger = ledger_of(RELEASE)
    with pytest.raises(CheckpointError, match="older checkpoint"):
        ledger.load_state_dict(state)
    assert ledger.steps == 1


def test_impossible_questions_are_refused():
    with pytest.raises(ConfigurationError, match="choose one of"):
        PrivacyLedger("moments")
    with pytest.raises(ConfigurationError, match="delta"):
        PrivacyLedger().epsilon(0.0)
    for phases in ([], [(10, 0)]):
        with pytest.raises(ConfigurationError, match="steps"):
            run_epsilon(phases, noise_multiplier=1.0, sample_size=100, target_delta=1e-5)
