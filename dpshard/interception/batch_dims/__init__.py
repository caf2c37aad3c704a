"""Find the dimension of each tensor that carries the samples, from runs on 2 and on 3 samples.

docs/architecture.md explains why.

Sample 3 repeats sample 1, so both runs take the same branch where values decide. Where the data decides which calls
run, their arguments are outputs of calls in both runs, or routed rows.
"""

from dpshard.interception.batch_dims.axes import PASS_THROUGH, CallKey, CallLayout, Layout, call_key, merge, rows_key
from dpshard.interception.batch_dims.probe import find_layout
