"""Attacks on the engine, and the lower bounds on epsilon that they prove."""

from dpshard.accounting.composition import gdp_delta, gdp_epsilon
from dpshard.applications.audit.bounds import (
    FALSE_ALARM,
    REFUTED_BEYOND,
    Guesses,
    Trials,
    guess,
    one_run_epsilon,
    one_run_p_value,
)
from dpshard.applications.audit.noise import Finding
from dpshard.applications.audit.one_run import Canaries, GradientCanaries, InputCanaries, refuted, toss_coins
from dpshard.applications.audit.releases import ReleasesAudit, audit_releases
from dpshard.applications.audit.steps import StepsAudit, audit_steps
from dpshard.applications.audit.whole_runs import audit_runs

__all__ = [
    "FALSE_ALARM",
    "REFUTED_BEYOND",
    "Canaries",
    "Finding",
    "GradientCanaries",
    "Guesses",
    "InputCanaries",
    "ReleasesAudit",
    "StepsAudit",
    "Trials",
    "audit_releases",
    "audit_runs",
    "audit_steps",
    "gdp_delta",
    "gdp_epsilon",
    "guess",
    "one_run_epsilon",
    "one_run_p_value",
    "refuted",
    "toss_coins",
]
