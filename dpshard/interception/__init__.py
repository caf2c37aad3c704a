"""Redirects every torch function that uses a trainable parameter to its rule, in the forward of the user's model."""

from dpshard.interception.modules import Interception, Session, Undisturbed
from dpshard.interception.run import Run, plan_run

__all__ = ["Interception", "Run", "Session", "Undisturbed", "plan_run"]
