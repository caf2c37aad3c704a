"""Rules: for each torch function, how one use of a trainable parameter becomes records of per-sample gradients.

One file per family. A rule runs the function as it is, cut off from the parameters, and records what the per-sample
gradient is made of; it decides nothing about clipping. Functions of parameters alone need no rule: see `derived`.
"""

from dpshard.rules import composites, conv, derived, elementwise, embedding, linear, norm, recurrent, routed, vectorized
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
]
