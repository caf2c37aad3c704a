"""From per-sample norms to clip coefficients and clipped sums. Begin with `tape.py`.

`clip` in `coefficients.py` computes the clip coefficients, by a function of `functions.py`. `_require_open` in
`tape.py` refuses a second backward; `arrive` in `group_tape.py` does so while a group is open. May import `records`,
`rules`, `noise` and below.
"""

from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, ClippingFunction, GlobalClipping

__all__ = ["AbadiClipping", "AutomaticClipping", "ClippingFunction", "GlobalClipping"]
