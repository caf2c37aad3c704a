"""Verifies that every sample has its own gradient, before and during training.

Begin with `verifier.py`. May import `interception` and below. Users call `engine.verify`.
"""

from dpshard.verification.collation import verified_collation
from dpshard.verification.packed import loss_on
from dpshard.verification.verifier import Verifier
