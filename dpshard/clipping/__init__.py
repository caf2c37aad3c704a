"""From per-sample norms to clip coefficients and clipped sums. Begin with `tape.py`.

`functions.py` has the clip coefficients, and `tape.py` the refusal of a second backward. May import `records`, `rules`,
`noise` and below.
"""

from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, ClippingFunction, GlobalClipping

__all__ = ["AbadiClipping", "AutomaticClipping", "ClippingFunction", "GlobalClipping"]
