"""Records in host memory until the norms are known.

[Note: Offloaded records]
A record is not needed between its norm and its sum. Its memory then leaves the GPU on a stream of its own, and returns
on another. Six orders keep each copy from reading or writing memory that something else still uses:

    copy out      after  compute: the record is computed
    compute       after  copy out, before it takes the record's memory for something else
    copy in       after  copy out: the host has all of it
    copy in       after  compute: what used the returned memory before is done
    compute       after  copy in, before the sum reads the record, or the memory is freed unread
    next copy out after  copy in, before pinned memory is used again

All are waits of streams for events: the CPU waits for nothing, and never reads pinned memory. No use of `record_stream`
lets the allocator decide when memory is free, so peaks repeat.

A missing wait would sum other records than those whose norms are known. So nothing rests on the waits alone. At the
first use of a GPU, trial.py compares returned records with the originals. If they differ, the CPU waits, too. And every
record is compared by a checksum of its bits whenever it returns. If one differs, its sum is 0 on the device, and no
release follows. This costs two reads of the record; the copies take fifty times as long.

`spill.py`: which records leave. `storages.py`: what of them. `copies.py`: how. `pinned.py`: where to. `trial.py`:
whether a GPU keeps the orders.
"""

from dpshard.records.offload.spill import RESERVE, Offload
from dpshard.records.offload.storages import Waiting

__all__ = ["RESERVE", "Offload", "Waiting"]
