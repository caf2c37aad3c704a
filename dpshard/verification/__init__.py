"""Verifies, before and during training, that every sample has its own gradient.

`verifier.py`: when to verify, and by which comparisons. `gradients.py`: a few samples together, against each one
alone. `company.py`: other inputs in some rows. `memory.py`: a sample after other samples. `lengths.py`: a micro-batch
without its longest rows. `collation.py`: a collate_fn with other rows. `watch.py`: changes between verifications.
`wide.py`: a failure in float32 is decided in float64.
May import `interception` and below. Not for users, who call `engine.verify`. Begin with `verifier.py`.
"""

from dpshard.verification.collation import verified_collation
from dpshard.verification.objectives import Loss
from dpshard.verification.verifier import Verifier

__all__ = ["Loss", "Verifier", "verified_collation"]
