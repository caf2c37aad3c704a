"""Find the dimension of each tensor that carries the samples, from runs of the model on batches of two sizes.

[Note: Evidence for the batch dimension]
A matching size proves nothing ([T, B, D] with T = B; [B * T, D]; a [T, T] table). So the model runs on 2 and on 3
samples: a dimension that grows by 3/2 carries the samples. Both runs share the first two samples, so values tell the
order of rows that are flattened into the batch. If no input or output of a call changes its shape, the call met no
sample. It derives a tensor from parameters only. Layouts are keyed by function and parameter, and hold for every batch
size.

If the values of all samples decide a branch (is any token masked?), perhaps only one run takes it. Then sample 3
repeats sample 1, so any() and all() give the same answer in both runs.

The data decides some calls (a loop over the experts with rows), so the other run may lack them. Their arguments come
from calls that both runs made, or are routed rows; see [Note: Routed rows] in routing.py.
"""

from dpshard.interception.batch_dims.axes import PASS_THROUGH, CallKey, CallLayout, Layout, call_key, merge, rows_key
from dpshard.interception.batch_dims.probe import find_layout

__all__ = ["PASS_THROUGH", "CallKey", "CallLayout", "Layout", "call_key", "find_layout", "merge", "rows_key"]
