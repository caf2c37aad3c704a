"""Rules: for each torch function, how a use of a trainable parameter becomes records.

Import new files below, so that `@rule` registers their rules. Not for users. Begin with `call.py`, then `linear.py`.
May import `records` and below.
"""

from dpshard.rules.registry import COMPOSITES, ROUTED_RULES, RULES, rule

from . import composites, conv, derived, elementwise, embedding, linear, norm, recurrent, routed, vectorized, vocabulary

__all__ = ["COMPOSITES", "ROUTED_RULES", "RULES", "rule"]
