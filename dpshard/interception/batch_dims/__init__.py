"""Find the dimension of each tensor that carries the samples, from runs on 2 and on 3 samples.

docs/architecture.md explains why.

If values decide a branch, sample 3 repeats sample 1, so both runs take it alike. If the data decides some calls, their
arguments come from calls that both runs made, or are routed rows.
"""

from dpshard.interception.batch_dims.axes import PASS_THROUGH, CallKey, CallLayout, Layout, call_key, merge, rows_key
from dpshard.interception.batch_dims.probe import find_layout

__all__ = ["PASS_THROUGH", "CallKey", "CallLayout", "Layout", "call_key", "find_layout", "merge", "rows_key"]
