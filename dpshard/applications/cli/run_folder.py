"""A run on disk; a killed run can resume.

[Note: What survives kill -9]
Files that a resumed run reads are replaced atomically. metrics.jsonl may be ahead of the last checkpoint, or end in
half a line. So resuming cuts it back. The steps between are computed again: with the same sums, they cost no budget.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from dpshard.applications.cli.formats import read_yaml, to_json
from dpshard.applications.cli.settings import TrainSettings, resolve
from dpshard.checkpoint.disk import flush, open_private, why
from dpshard.config import is_count
from dpshard.errors import ConfigurationError, DpshardError, RunFolderError

LOCK = ".lock"
"""Locked while a process trains in a folder."""


class RunFolder:
    """Files of the run at `path`; epsilon covers only the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"  # JSON per step: NOT private
        self.checkpoints = path / "checkpoints"  # with the run secret: NOT private
        self.plots = path / "plots"  # NOT private
        self.model = path / "model.pt"  # weights, which epsilon covers
        self.columns = path / "columns.json"  # facts of a table's columns, which epsilon covers, too
        self.report = path / "report.md"  # as report.json
        self.audit = path / "audit.json"
        self.provenance = path / "provenance.json"  # with a fingerprint of the data: NOT private

    @classmethod
    def create(cls, path: Path | None, settings: TrainSettings) -> RunFolder:
        """Create `path`, or runs/TASK-DATE-TIME."""
        path = path or Path("runs") / f"{settings.task}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = cls(path)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a folder: choose another --out.")
        if path.exists() and any(path.iterdir()):
            raise RunFolderError(f"{path} exists already: resume that run by --resume {path}, or choose another --out.")
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            folder.checkpoints.mkdir(mode=0o700)
            folder.plots.mkdir(mode=0o700)
            write_atomically(folder.config, settings.to_yaml().encode())
            folder.metrics.touch(mode=0o600)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the run at `path`."""
        folder = cls(path)
        if not folder.config.is_file():
            raise RunFolderError(
                f"{path} is not a run folder: it has no config.yaml. Name a folder that dpshard train made."
            )
        return folder

    def settings(self) -> TrainSettings:
        """Return the run's settings."""
        try:
            return resolve(read_yaml(self.config))
        except ConfigurationError as error:
            raise RunFolderError(f"{self.config} was damaged or edited: {error}") from error

    @contextmanager
    def locked(self, *, by_children: bool = False) -> Iterator[None]:
        """Keep others from this folder; `by_children`, until they have ended, too."""
        with _explained(self.path):
            lock = (self.path / LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(f"Another process is training in {self.path}: wait for it, or stop it.") from error
            os.set_inheritable(lock.fileno(), by_children)
            yield

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl."""
        rows = self._rows()
        if None in rows:
            line = f"line {rows.index(None) + 1} has no step"
            raise RunFolderError(f"{self.metrics} was damaged or edited ({line}): restore it from a copy.")
        return [row for row in rows if row is not None]

    def _rows(self) -> list[dict[str, Any] | None]:
        with _explained(self.path):
            lines = self.metrics.read_bytes().splitlines(keepends=True)
        return [_row(line) for line in lines if line.endswith(b"\n")]

    @contextmanager
    def append_metrics(self, *, after_step: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Cut the metrics back to `after_step` steps, and yield a function that appends and flushes a row."""
        rows = [row for row in self._rows() if row is not None] if self.metrics.exists() else []
        if len({row["step"] for row in rows}) < after_step:
            warnings.warn(
                f"{self.metrics} is missing or damaged: {len(rows)} of its lines can be read, after {after_step} "
                f"steps. The training continues; plots and metrics lack the other steps.",
                stacklevel=3,
            )
        kept = [row for row in rows if row["step"] <= after_step]
        write_atomically(self.metrics, "".join(f"{to_json(row)}\n" for row in kept).encode())
        with _explained(self.path):
            file = self.metrics.open("a", encoding="utf-8")

        def append(row: Mapping[str, Any]) -> None:
            with _explained(self.path):
                file.write(f"{to_json(row)}\n")
                file.flush()

        with file:
            yield append


def write_json(path: Path, figures: Any, *, public: bool = False) -> None:
    """Write figures as JSON; see `write_atomically`."""
    write_atomically(path, to_json(figures, 2).encode(), public=public)


def write_atomically(path: Path, content: bytes, *, public: bool = False) -> None:
    """Replace `path`; a power cut leaves the old file or the new one. Only the user may read it, unless `public`."""
    # Per process, because two may write one file at once.
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    with _explained(path):
        try:
            with open_private(temporary, "wb", public=public) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        flush(path.parent)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_count(row.get("step")) else None


@contextmanager
def intact(path: Path, remedy: str) -> Iterator[None]:
    """Raise RunFolderError with a `remedy` if the block finds `path` damaged."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, DpshardError):
            raise
        found = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"
        raise RunFolderError(f"{path} was damaged or edited ({found}): {remedy}.") from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(
            f"{path} cannot be written or read: {why(error, path)}. Check the path, your permissions, and the space on "
            f"the disk."
        ) from error
