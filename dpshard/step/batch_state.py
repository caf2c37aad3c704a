"""The states of a logical batch."""

from __future__ import annotations

from enum import Enum, auto


class BatchState(Enum):
    """State of the gradients of the logical batch (a lot in Abadi et al. 2016, arXiv:1607.00133).

        event                                    from                to           epoch
        `batches` hands out a logical batch      EMPTY, PRIVATIZED   EMPTY
        a backward delivers clipped sums         all but CLOSED      COLLECTING
        own loop: release                        COLLECTING          PRIVATIZED
        own loop: refused without a backward     COLLECTING          EMPTY        + 1
        own loop: failed after it was counted    COLLECTING          EMPTY        + 1
        logical batch: release                   EMPTY, COLLECTING   PRIVATIZED   + 1
        logical batch: left early                EMPTY, COLLECTING   EMPTY        + 1
        `batches` begins; `restart`              all but CLOSED      EMPTY        + 1
        `close`                                  all                 CLOSED       + 1

    Logical batches and tapes are valid in the epoch in which they were made.
    """

    EMPTY = auto()
    COLLECTING = auto()
    PRIVATIZED = auto()  # noise is in: gradients are safe
    CLOSED = auto()  # the engine was detached
