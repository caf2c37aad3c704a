"""Privacy accounting: releases, the ledger that counts them, their epsilon, and calibration; no torch in here."""

from dpshard.accounting.calibration import (
    calibrate_noise_multiplier,
    compute_bound,
    compute_epsilon,
    steps_for_epsilon,
)
from dpshard.accounting.composition import Bound, check_accountant, check_search, check_supported
from dpshard.accounting.ledger import PrivacyLedger
from dpshard.accounting.releases import Release, planned_releases, poisson_relation, relation_name, rounded_up
from dpshard.accounting.search import RunsDistribution, Search

__all__ = [
    "Bound",
    "PrivacyLedger",
    "Release",
    "RunsDistribution",
    "Search",
    "calibrate_noise_multiplier",
    "check_accountant",
    "check_search",
    "check_supported",
    "compute_bound",
    "compute_epsilon",
    "planned_releases",
    "poisson_relation",
    "relation_name",
    "rounded_up",
    "steps_for_epsilon",
]
