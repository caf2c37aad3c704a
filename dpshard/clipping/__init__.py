"""From per-sample norms to clip coefficients and clipped sums. Begin with `tape.py`.

`functions.py`: clipping functions. `thresholds.py`: fixed and adaptive ones. `autograd_nodes.py`: nodes that collect
records. `closer.py`, `scheme.py`, `closing.py`, `group_tape.py`: groups close. `parts.py`: ranks with parts of a model.
`stacks.py`: small uses. `region.py`: compiled regions. `metrics.py`: figures, not private. May import `records`,
`rules`, `noise` and below.
"""

from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, ClippingFunction, GlobalClipping

__all__ = ["AbadiClipping", "AutomaticClipping", "ClippingFunction", "GlobalClipping"]
