"""Records in host memory until the norms are known.

[Note: Offloaded records]
Between its norm and its sum, a record leaves the GPU on one stream, and returns on another. Six waits between streams
keep copies from memory that other work still uses:

    copy out      after  compute: the record is computed
    compute       after  copy out, before it takes the record's memory for something else
    copy in       after  copy out: the host has all of it
    copy in       after  compute: what used the returned memory before is done
    compute       after  copy in, before the sum reads the record, or the memory is freed unread
    next copy out after  copy in, before pinned memory is used again

`record_stream` would let the allocator decide when memory is free; without it, peaks are the same in each run.

Without a wait, sums might use other bits than the norms. So self_test.py compares returned records at the first
use of a GPU; if they differ, the CPU waits, too. A checksum compares every record that returns. If one differs, its sum
is 0 on the device, and no release follows.
"""

from dpshard.records.offload.spill import RESERVE, Offload
from dpshard.records.offload.storages import Waiting
