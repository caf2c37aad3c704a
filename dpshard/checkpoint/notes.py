"""Notes of releases: one rank writes them, and all wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from dpshard.backends.ranks import Ranks
from dpshard.checkpoint.disk import explained
from dpshard.checkpoint.journal import Journal
from dpshard.errors import CheckpointError


class ReleaseNotes:
    """Writes releases to a journal; all ranks make it together.

    Without a wait, other ranks could use a release that a crash of the first then forgets.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ranks = Ranks()  # of its own, since a thread may save by others

    def note(self, step: int, identity: bytes) -> Callable[[], object]:
        """Note a release on the first rank; return a function of all ranks that waits for the disk.

        The function raises CheckpointError, on all ranks, if it cannot be written. In one process `note` may, too.
        """
        if not self._ranks.first:
            return lambda: self._ranks.on_first(lambda: None)
        try:
            written = explained(self._journal.path, lambda: self._journal.note(step, identity))()
        except CheckpointError as error:
            if self._ranks.alone:
                raise
            written = Future()  # other ranks wait for this one
            written.set_exception(error)
        return lambda: self._ranks.on_first(explained(self._journal.path, written.result))
