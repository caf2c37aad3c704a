"""Redirects every torch function that uses a trainable parameter to its rule, in the forward of the user's model."""

from dpshard.interception.interfaces import Session
from dpshard.interception.modules import Interception
from dpshard.interception.run import Run, plan_run
from dpshard.interception.undisturbed import Undisturbed

__all__ = ["Interception", "Run", "Session", "Undisturbed", "plan_run"]
