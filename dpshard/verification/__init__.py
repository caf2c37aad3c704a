"""Verifies, before and during training, that every sample has its own gradient.

`verifier.py` decides when and by what. May import `interception` and below. Users call `engine.verify`.
"""

from dpshard.verification.collation import verified_collation
from dpshard.verification.packed import loss_on
from dpshard.verification.verifier import Verifier

__all__ = ["Verifier", "loss_on", "verified_collation"]
