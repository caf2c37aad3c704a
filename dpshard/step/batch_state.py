"""The states of a logical batch."""

from __future__ import annotations

from enum import Enum, auto


class BatchState(Enum):
    """State of the gradients of the logical batch (a lot in Abadi et al. 2016, arXiv:1607.00133).

        event                                         from                to           epoch
        `batches` hands out a logical batch           EMPTY, PRIVATIZED   EMPTY
        a backward delivers clipped sums              all but CLOSED      COLLECTING
        the release of a user's own loop              COLLECTING          PRIVATIZED
        it is refused (a forward had no backward)     COLLECTING          EMPTY        + 1
        it fails after it was counted                 COLLECTING          EMPTY        + 1
        the release of a logical batch                EMPTY, COLLECTING   PRIVATIZED   + 1
        the loop is left early                        EMPTY, COLLECTING   EMPTY        + 1
        `batches` begins; `restart`                   all but CLOSED      EMPTY        + 1
        `close`                                       all                 CLOSED       + 1

    Logical batches and tapes are valid in the epoch in which they were made.
    """

    EMPTY = auto()
    COLLECTING = auto()
    PRIVATIZED = auto()  # noise is in: gradients are safe to use, any number of times
    CLOSED = auto()  # the engine was detached
