"""Engines that exchange states of several runs count every release that they, or the loaded state, tell of.

Failure mode 24: all of this file.
"""

import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from dpshard.accounting.budget import Budget
from dpshard.accounting.mechanism import Mechanism
from dpshard.config import BatchSchedule, require_delta
from dpshard.errors import BudgetExceededError

MECHANISM = Mechanism(
    noise_multiplier=1.0,
    schedule=BatchSchedule.parse(10, sample_size=1000, epochs=None, steps=9),
    sample_size=1000,
    max_grad_norm=1.0,
    clipping_fn="",
    clipping_groups=(),
    adaptive_clipping=None,
    loss_reduction="mean",
    secure=False,
    accountant="pld",
    target_delta=1e-5,
    target_epsilon=None,
)


class Process:
    """A budget, and the releases that it must count: (run, step, identity), of equal ones one."""

    def __init__(self, run):
        self.budget = Budget(MECHANISM, allow_overspend=True, run=run)
        self.own, self.owed = set(), set()

    def spend(self, sums):
        ledger = self.budget.ledger
        release = ledger.run, ledger.steps, sums
        self.budget.spend(repr(release).encode(), unverified_sampling=False)
        self.own.add(release)
        self.owed.add(release)
        self.check()

    def save(self):
        return json.loads(json.dumps(self.budget.state_dict())), frozenset(self.owed)

    def load(self, state, released=None):
        account, owed = state
        self.budget.load_state_dict(account)
        self.owed = set(owed) | self.own
        if released:
            steps = self.budget.ledger.steps
            self.budget.count_released(steps + released)
        self.check()

    def check(self):
        counted = Counter()
        for span in self.budget.ledger._spans:
            counted.update((span.run, step) for step in range(span.start, span.stop))
        owed = Counter((run, step) for run, step, _ in self.owed)
        assert owed <= counted, owed - counted
        Budget(MECHANISM, allow_overspend=True).load_state_dict(self.save()[0])


@pytest.mark.filterwarnings("ignore:Step .* was released before")
def test_a_loaded_state_and_all_own_releases_are_counted():
    for seed in range(100):
        random = Random(seed)
        processes = [Process(run) for run in "abc"]
        states = [process.save() for process in processes[:2]]
        for _ in range(30):
            process = random.choice(processes)
            if random.random() < 0.5:
                process.spend(random.randrange(2))
                states.append(process.save())
            else:
                process.load(random.choice(states))
                states.append(process.save())


def spent(steps):
    process = Process("a")
    states = [process.save()]
    for _ in range(steps):
        process.spend(0)
        states.append(process.save())
    return states


def releases(process):
    return process.budget.ledger.releases


def test_going_back_and_forth_between_states_forgets_none():
    states, other = spent(5), Process("b")
    late, early = states[5], states[2]
    for state, n in ((late, 5), (early, 2), (late, 5), (late, 5)):
        other.load(state)
        assert releases(other) == n


def test_going_back_in_one_process_counts_nothing_twice():
    process, states = Process("a"), []
    for _ in range(4):
        process.spend(0)
        states.append(process.save())
    for state in (*states[1::-1], *states):
        process.load(state)
        assert releases(process) == 4


@pytest.mark.filterwarnings("ignore:Step .* was released before")
def test_releases_that_only_a_former_state_counted_are_charged():
    process, states = Process("a"), []
    for _ in range(5):
        process.spend(0)
        states.append(process.save())
    process.load(states[1])
    back, other = process.save(), Process("b")
    other.load(back)  # knows the later releases
    other.load(states[1])
    for _ in range(3):
        other.spend(0)
    assert releases(other) == 5


def test_releases_after_a_state_count_whatever_was_loaded_before():
    states = spent(5)
    other = Process("b")
    other.load(states[5])
    other.load(states[2], released=3)
    assert releases(other) == 5


def test_a_release_of_a_state_that_was_made_again_stays_counted():
    process = Process("a")
    start = process.save()
    process.spend(0)
    process.load(start)
    other = Process("b")
    other.load(process.save())
    other.spend(0)
    assert releases(other) == 1
    other.load(Process("c").save())
    assert releases(other) == 1


@pytest.mark.parametrize(("fed", "releases"), [(False, 2), (True, 3)])
def test_lost_releases_of_a_script_that_feeds_its_batches_may_be_of_others(fed, releases):
    budget = Budget(MECHANISM, allow_overspend=True)
    budget.spend(b"0", unverified_sampling=fed)
    budget.count_released([(1, b"1"), (1, b"2")])
    assert budget.ledger._cost.total() == releases


def test_an_error_shows_no_smaller_delta_than_it_is_about():
    """1 / 2200 to 6 figures is 0.000454545, which is less."""
    delta = 1 / 2200
    budget = Budget(replace(MECHANISM, target_delta=delta, target_epsilon=0.01), allow_overspend=False)
    with pytest.raises(BudgetExceededError, match=f"target_epsilon=0.01 at delta={delta!r}: "):
        budget.spend(b"", unverified_sampling=False)
    with pytest.warns(UserWarning, match=f"target_delta={delta!r} is at least 1/N"):
        require_delta(delta, 2200)
