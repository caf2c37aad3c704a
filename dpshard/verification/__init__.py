"""Holds the gradients of rules and anchors against plain autograd, one sample at a time, before the training.

`verify.py`: the comparison. `count_sketch.py`: what it keeps of a gradient.
May import `interception` and below. Not for users, who call `engine.verify`. Begin with `verify.py`.
"""

from dpshard.verification.verify import compare

__all__ = ["compare"]
