"""Verifies, before and during training, that every sample has its own gradient.

`verifier.py`: when and what to compare. `gradients.py`: samples together against each one by itself. `company.py`:
other inputs in some rows. `memory.py`: a sample after others. `lengths.py`: a micro-batch without its longest rows.
`packed.py`: packed units against each unit alone. `input_gradients.py`: what a stage of a pipeline sends back.
`collation.py`: a collate_fn with other rows. `watch.py`: changes between verifications. `wide.py`: float64 decides
failures in float32. May import `interception` and below. Not for users, who call `engine.verify`.
"""

from dpshard.verification.collation import verified_collation
from dpshard.verification.packed import loss_on
from dpshard.verification.verifier import Verifier

__all__ = ["Verifier", "loss_on", "verified_collation"]
