"""Rules: for each torch function, how one use of a trainable parameter becomes records of per-sample gradients.

A rule runs the function cut off from the parameters, and records the parts of the per-sample gradient. Functions of
parameters only need no rule: see `derived`. Import new files below, so that `@rule` registers their rules. A new rule
needs a test against single samples in tests/rules, and a row in docs/functions.md.
May import `records` and below. Not for users. Begin with `call.py`, then `linear.py`.
"""

from dpshard.rules import (
    composites,
    conv,
    derived,
    elementwise,
    embedding,
    linear,
    norm,
    recurrent,
    routed,
    vectorized,
    vocabulary,
)
from dpshard.rules.registry import COMPOSITES, ROUTED_RULES, RULES, rule

__all__ = [
    "COMPOSITES",
    "ROUTED_RULES",
    "RULES",
    "composites",
    "conv",
    "derived",
    "elementwise",
    "embedding",
    "linear",
    "norm",
    "recurrent",
    "routed",
    "rule",
    "vectorized",
    "vocabulary",
]
