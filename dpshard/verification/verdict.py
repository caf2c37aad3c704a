"""Messages between ranks that verify together.

Where forwards gather parameters, all ranks take part in each. Before each forward, every rank reports whether it has
failed, so that no rank waits for a failed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpshard.backends.communicator import Communicator
from dpshard.errors import VerificationError


class Verdict:
    """The decision of all ranks whether to continue; `ranks` is None if this rank verifies by itself."""

    def __init__(self, ranks: Communicator | None = None) -> None:
        self._ranks = ranks
        self._over = False
        self._in_forward = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Raise VerificationError on all ranks if a comparison fails on one."""
        try:
            yield
            self._tell(failed=False)
        except Exception:
            # Within a forward, other ranks wait for this rank's gathers.
            if not (self._over or self._in_forward):
                self._tell(failed=True)
            raise

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a block for a forward. Raises VerificationError if another rank has failed."""
        self._tell(failed=False)
        self._in_forward = True
        yield
        self._in_forward = False

    def _tell(self, *, failed: bool) -> None:
        if self._ranks is None:
            return
        others = self._ranks.all_gather(torch.tensor([int(failed)], device="cpu"))
        if not failed and bool(others.any()):
            self._over = True
            raise VerificationError(
                "Verification failed on another rank, whose message says why: the rows of this rank do not show it."
            )
