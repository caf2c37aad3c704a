"""The states of a logical batch's gradients."""

from __future__ import annotations

from enum import Enum, auto


class BatchState(Enum):
    """State of the gradients of the logical batch (called a lot in Abadi et al. 2016, arXiv:1607.00133).

    | from               | event                                                         | to         | epoch |
    |--------------------|---------------------------------------------------------------|------------|-------|
    | EMPTY, PRIVATIZED  | `batches` hands out a logical batch                           | EMPTY      |       |
    | EMPTY, PRIVATIZED  | a backward delivers its first clipped sums                    | COLLECTING |       |
    | COLLECTING         | backwards deliver more                                        | COLLECTING |       |
    | COLLECTING         | the release of a loop of the user's own                       | PRIVATIZED |       |
    | COLLECTING         | such a release is refused: a forward had no backward          | EMPTY      | + 1   |
    | COLLECTING         | such a release fails after it was counted                     | EMPTY      | + 1   |
    | EMPTY, COLLECTING  | the release of a logical batch                                | PRIVATIZED | + 1   |
    | EMPTY, COLLECTING  | the loop is left before all micro-batches were handed out     | EMPTY      | + 1   |
    | all but CLOSED     | `batches` begins; `restart`                                   | EMPTY      | + 1   |
    | all                | `close`                                                       | CLOSED     | + 1   |

    Logical batches and tapes are valid in the epoch in which they were made.
    """

    EMPTY = auto()  # nothing was collected
    COLLECTING = auto()  # clipped sums accumulate
    PRIVATIZED = auto()  # noise is in: gradients are safe to use, any number of times
    CLOSED = auto()  # the engine was detached
