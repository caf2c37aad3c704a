"""A release, a budget, and ledgers to test with."""

from dpshard.accounting import PrivacyLedger, Release

RELEASE = Release(1.0, 0.01, 10_000)
BUDGET = {"target_epsilon": 1.0, "target_delta": 1e-5}


def ledger_of(*releases, accountant="pld"):
    ledger = PrivacyLedger(accountant)
    for release in releases:
        ledger.record(release)
    return ledger
