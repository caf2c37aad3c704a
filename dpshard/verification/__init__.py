"""Holds a model to the definition of a per-sample gradient, before the training and during it.

`verifier.py`: when, and by which comparisons. `gradients.py`: a few samples together, against each one alone.
`company.py`: the inputs of some rows are changed. `memory.py`: a sample after other samples. `lengths.py`: without the
longest row. `watch.py`: what changes in between. `wide.py`: float64 decides.
`collation.py`: what a collate_fn makes of samples in other company.
May import `interception` and below. Not for users, who call `engine.verify`. Begin with `verifier.py`.
"""

from dpshard.verification.collation import verified_collation
from dpshard.verification.objectives import Loss
from dpshard.verification.verifier import Moment, Verifier

__all__ = ["Loss", "Moment", "Verifier", "verified_collation"]
