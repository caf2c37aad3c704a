"""From per-sample norms to clip coefficients and clipped sums.

`functions.py`: clipping functions. `groups.py`: clipping groups and styles. `thresholds.py`: fixed and adaptive ones.
`autograd_nodes.py`: nodes that collect records in backward. `tape.py`: the records of some samples, their clip
coefficients, and the refusal of a second backward. `parts.py`: what a tape asks of ranks with parts of a model.
`group_tape.py`: norms and sums of one group. `stacks.py`: small uses, recorded together. `closing.py`: from squared
norms to coefficients. `region.py`: uses of a compiled region. `owed_backwards.py`: which forwards had a backward.
`two_pass.py`: two backward passes. `checkpointing.py`: selective checkpointing. `metrics.py`: figures of a logical
batch, not private. May import `records`, `rules`, `noise` and below. Users import the clipping functions from here.
Begin with `tape.py`.
"""

from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, ClippingFunction, GlobalClipping

__all__ = ["AbadiClipping", "AutomaticClipping", "ClippingFunction", "GlobalClipping"]
