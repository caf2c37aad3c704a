"""The journal of a run: every release, written before it is used.

A crash loses the releases after the last checkpoint, but someone may have seen them. So step and identity of each
release ([Note: What a step that is taken again costs]) are on the disk before it is handed out. A resumed run counts
all entries after its checkpoint; repeating one costs nothing more. If an entry is truncated, its release was not handed
out. The file is made before the first checkpoint, so a missing file was lost.

A checkpoint covers all entries before it. So a process writes and saves only if it found, loaded or wrote all entries.
An entry that equals its own last one is harmless, because it is the same release, noted twice.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dpshard.backends.ranks import Ranks
from dpshard.checkpoint.disk import explained, flush, open_private, write_all
from dpshard.errors import CheckpointError

_ENTRY = struct.Struct("<Q16s")
_CHECK = 8
_LENGTH = _ENTRY.size + _CHECK

Release = tuple[int, bytes]
"""Step, and identity of 16 bytes."""


class Mark(NamedTuple):
    """A place in a journal."""

    entries: int
    """Entries before it."""
    newest: str
    """The last of these entries, in hexadecimal; "" without entries, or in older checkpoints."""

    def after(self, step: int, identity: bytes) -> Mark:
        """Return the mark behind one more release."""
        return Mark(self.entries + 1, _entry(step, identity).hex())


class Journal:
    """Appends releases to the file at `path`, and reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._known: int | None = None  # entries found, loaded or written by this process
        self._last = b""  # own entry
        self._thread = ThreadPoolExecutor(1, "dpshard-journal")

    def __len__(self) -> int:
        return self.path.stat().st_size // _LENGTH if self.path.exists() else 0

    def mark(self) -> Mark:
        """Return the end of the journal. Raises CheckpointError if another process has written to it."""
        entries = self._require_own()
        if not entries:
            return Mark(0, "")
        with self.path.open("rb") as file:
            file.seek((entries - 1) * _LENGTH)
            return Mark(entries, file.read(_LENGTH).hex())

    def create(self) -> None:
        """Make the file unless it exists. Raises OSError if the file existed before and is lost."""
        if self._descriptor is not None:
            self._require_kept(self._descriptor)
        elif not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open_private(self.path, "ab").close()
            flush(self.path.parent)

    def note(self, step: int, identity: bytes) -> Future[None]:
        """Append a release; the future is done when it is on the disk. Both may raise OSError.

        Raises CheckpointError if another process has written to the journal.
        """
        if self._descriptor is None:
            self._descriptor = self._open()
        self._require_kept(self._descriptor)
        entry = _entry(step, identity)
        known = self._require_own(entry)
        write_all(self._descriptor, entry)
        self._known, self._last = known + 1, entry
        return self._thread.submit(os.fsync, self._descriptor)

    def since(self, mark: Mark) -> list[Release] | None:
        """Return the entries after `mark`, now counted as loaded; None if missing, damaged, or of another journal."""
        found = self.path.exists()
        start, content = mark.entries, self.path.read_bytes() if found else b""
        self._known = len(content) // _LENGTH
        if not found:
            return None
        entries = [content[at : at + _LENGTH] for at in range(start * _LENGTH, len(content) - _LENGTH + 1, _LENGTH)]
        if len(content) < start * _LENGTH or any(x[_ENTRY.size :] != _digest(x[: _ENTRY.size]) for x in entries):
            return None
        if mark.newest and content[(start - 1) * _LENGTH : start * _LENGTH].hex() != mark.newest:
            return None  # another run's journal
        return [_ENTRY.unpack(entry[: _ENTRY.size]) for entry in entries]

    def _open(self) -> int:
        self.create()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(descriptor, len(self) * _LENGTH)  # removes a truncated entry
        return descriptor

    def _require_own(self, entry: bytes = b"") -> int:
        """Raise CheckpointError unless each new entry is `entry` or this process's last; return the number of all."""
        entries = len(self)
        if self._known is not None and entries > self._known:
            with self.path.open("rb") as file:
                file.seek(self._known * _LENGTH)
                new = [file.read(_LENGTH) for _ in range(entries - self._known)]
            if not {entry, self._last}.issuperset(new):
                raise CheckpointError(
                    f"Another process (or engine) trains in {self.path.parent}. It wrote {len(new)} releases to "
                    f"{self.path.name}, which this one would not count. End the other job, then start this one anew: "
                    f"load() counts the releases of both. Two runs need two folders."
                )
        self._known = entries
        return entries

    def _require_kept(self, descriptor: int) -> None:
        try:
            kept = os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            kept = False
        if not kept:
            reason = "the file was removed or replaced while this run wrote to it. Start anew from the last checkpoint"
            raise OSError(errno.ENOENT, reason, str(self.path))


def _entry(step: int, identity: bytes) -> bytes:
    entry = _ENTRY.pack(step, identity)
    return entry + _digest(entry)


def _digest(entry: bytes) -> bytes:
    return hashlib.sha256(entry).digest()[:_CHECK]


class ReleaseNotes:
    """Writes releases to a journal; all ranks make it together.

    Without the wait, other ranks could use a release that is lost if the first rank crashes.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ranks = Ranks()  # a group of its own, because a thread may be saving through other groups

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
