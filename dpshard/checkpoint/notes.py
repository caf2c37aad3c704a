"""Notes of releases: one rank writes them, and all wait for the disk."""

from __future__ import annotations

from collections.abc import Callable

from dpshard.backends.ranks import Ranks
from dpshard.checkpoint.disk import explained
from dpshard.checkpoint.journal import Journal


class ReleaseNotes:
    """Writes releases to a journal; all ranks make it together.

    Without a wait, other ranks could use a release that a crash of the first then forgets.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ranks = Ranks()  # of its own, since a thread may save by others

    def note(self, step: int, identity: bytes) -> Callable[[], object]:
        """Note a release on the first rank; return a wait for the disk. Both raise CheckpointError."""
        if not self._ranks.first:
            return lambda: self._ranks.on_first(lambda: None)
        written = explained(self._journal.path, lambda: self._journal.note(step, identity))()
        return lambda: self._ranks.on_first(explained(self._journal.path, written.result))
