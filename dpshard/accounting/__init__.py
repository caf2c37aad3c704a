"""Privacy accounting: releases, their ledger, their epsilon, and calibration.

`releases.py`, `mechanism.py`, `courses.py`: the facts. `composition.py`, `convolution.py`, `mixtures.py`, `bounds.py`:
the mathematics. `calibration.py`: the noise for an epsilon. `ledger.py`, `copies.py`, `history.py`, `budget.py`: a
run. `search.py`: a search over many runs. Imports no torch, and dp-accounting only when needed. Begin with
`releases.py`.
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
