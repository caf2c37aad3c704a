"""Audits: attacks on the real engine, and what their success proves about epsilon."""

from dpshard.audit.bounds import Guesses, Trials, gdp_delta, gdp_epsilon, guess, one_run_epsilon, one_run_p_value
from dpshard.audit.steps import REFUTED_BEYOND, StepsAudit, audit_steps

__all__ = [
    "REFUTED_BEYOND",
    "Guesses",
    "StepsAudit",
    "Trials",
    "audit_steps",
    "gdp_delta",
    "gdp_epsilon",
    "guess",
    "one_run_epsilon",
    "one_run_p_value",
]
