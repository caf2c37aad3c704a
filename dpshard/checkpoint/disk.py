"""Flushes folders, and explains failed writes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from dpshard.errors import CheckpointError

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flush(folder: Path) -> None:
    """Flush the folder's directory entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; one `os.write` may write a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def open_private(path: Path, mode: str, *, public: bool = False) -> IO[Any]:
    """Open a file as `open`; a new one may be read only by its owner, unless `public`."""
    rights = 0o644 if public else 0o600
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, rights))


def explained(place: Path, work: Callable[[], T]) -> Callable[[], T]:
    """Return `work`, changed to raise CheckpointError in place of OSError."""

    def run() -> T:
        try:
            return work()
        except OSError as error:
            path = Path(error.filename or place)
            raise CheckpointError(f"{path} cannot be written or read: {why(error, path)}.") from error

    return run


def why(error: BaseException, path: Path) -> str:
    """Return the reason of `error` at `path`."""
    # torch's writer ignores the OSError, counts the written bytes, and raises this RuntimeError.
    cut_short = isinstance(error, RuntimeError) and ("inline_container" in str(error) or "file write" in str(error))
    if not cut_short and getattr(error, "errno", None) not in _FULL:
        return (isinstance(error, OSError) and error.strerror) or str(error) or repr(error)
    return f"the disk is full, or a quota or a limit on file sizes is reached ({_free(path)})"


def _free(path: Path) -> str:
    place = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    try:
        return f"{shutil.disk_usage(place).free:,} bytes are free there"
    except OSError:
        return "the number of free bytes is unknown"
