"""Redirects every torch function that uses a trainable parameter to its rule, in the forward of the user's model."""

from dpshard.interception.copies import Copies
from dpshard.interception.doubts import Doubts
from dpshard.interception.isolation import Undisturbed
from dpshard.interception.patching import Interception
from dpshard.interception.protocols import Session
from dpshard.interception.row_identity import RowIdentity
from dpshard.interception.run import Run, plan_run

__all__ = ["Copies", "Doubts", "Interception", "RowIdentity", "Run", "Session", "Undisturbed", "plan_run"]
