"""Privacy accounting: releases, their ledger, their epsilon, and calibration.

Imports no torch, and dp-accounting only when needed. Begin with `releases.py`. May import `records`, `noise`,
`sampling` and below.
"""

from dpshard.accounting.bounds import Bound, compute_bound, compute_epsilon, epsilon_of
from dpshard.accounting.calibration import calibrate, calibrate_release, steps_for_epsilon
from dpshard.accounting.ledger import PrivacyLedger
from dpshard.accounting.mechanism import Mechanism, MechanismOfUnits, SampledMechanism
from dpshard.accounting.releases import Release, relation_of, rounded_up
from dpshard.accounting.search import RunsDistribution, Search

__all__ = [
    "Bound",
    "Mechanism",
    "MechanismOfUnits",
    "PrivacyLedger",
    "Release",
    "RunsDistribution",
    "SampledMechanism",
    "Search",
    "calibrate",
    "calibrate_release",
    "compute_bound",
    "compute_epsilon",
    "epsilon_of",
    "relation_of",
    "rounded_up",
    "steps_for_epsilon",
]
