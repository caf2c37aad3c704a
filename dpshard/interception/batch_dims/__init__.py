"""Which dimension of a tensor carries the samples: found by running the model on batches of two sizes.

[Note: Evidence for the batch dimension]
A shape that happens to match proves nothing ([T, B, D] with T = B; [B * T, D]; a [T, T] table). So the model runs
twice, on 2 and on 3 samples: what is 3/2 as long the second time carries the samples. Rows of one
sample that are flattened into the batch are told apart by their values: the first two samples are the same in both
runs. A function of parameters whose inputs and outputs keep their shapes has met no sample: it derives a tensor from
parameters only. What is found is keyed by function and parameter, not by order, and holds for every batch size.

A branch may depend on the values of all samples (is any token masked?), and then only one of the runs may take it. In
that case sample 3 repeats sample 1, so that any() and all() give the same answer in both runs.

Calls that follow from what the data picked (a loop over the experts that were hit) have no place in the other run to
be compared with. Of their arguments, those that were made on the common course are known from there, and routed rows
are followed; see [Note: Routed rows] in routing.py.
"""

from dpshard.interception.batch_dims.axes import PASS_THROUGH, CallKey, CallLayout, Layout, call_key, merge, rows_key
from dpshard.interception.batch_dims.probe import find_layout

__all__ = ["PASS_THROUGH", "CallKey", "CallLayout", "Layout", "call_key", "find_layout", "merge", "rows_key"]
