"""A run on disk: settings, metrics, checkpoints, plots and the report, such that a killed run can go on.

[Note: What survives kill -9]
Files that are read back on resume are replaced as a whole: written beside their place, flushed to the disk, renamed.
metrics.jsonl grows by one line a step; after a kill it may be ahead of the last checkpoint, or end in half a line, so
resuming cuts it back to the checkpoint's step. Nothing private depends on it: damaged lines are left out, and a missing
file is begun anew. The steps in between are computed again with the same samples. If their sums are the same, they
cost no further budget (dpshard/noise/digest.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dpshard.applications.cli.formats import to_json
from dpshard.applications.cli.settings import TrainSettings, read_yaml, resolve
from dpshard.checkpoint.disk import why
from dpshard.config import is_count
from dpshard.errors import ConfigurationError, DpshardError, RunFolderError


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path | None, settings: TrainSettings) -> RunFolder:
        """A new folder at `path`, by default runs/TASK-DATE-TIME; RunFolderError if it is taken or unwritable."""
        path = path or Path("runs") / f"{settings.task}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = cls(path)
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is a file, not a folder: choose another --out.")
        if path.exists() and any(path.iterdir()):
            raise RunFolderError(
                f"The run folder {path} exists already: go on with it by --resume {path}, or choose another --out."
            )
        with _explained(path):
            folder.checkpoints.mkdir(parents=True)
            write_atomically(folder.config, settings.to_yaml().encode())
            folder.metrics.touch()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The existing run at `path`; RunFolderError if there is none."""
        folder = cls(path)
        if not folder.config.is_file():
            raise RunFolderError(
                f"{path} is no run folder: it has no {folder.config.name}. Name one that dpshard train has made."
            )
        return folder

    @property
    def config(self) -> Path:
        """The settings."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """A line of JSON per step. NOT private."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """States to resume from. They hold the run secret: NOT private."""
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        """Pictures of the metrics. NOT private."""
        return self.path / "plots"

    @property
    def model(self) -> Path:
        """The trained weights: what epsilon is about."""
        return self.path / "model.pt"

    @property
    def report(self) -> Path:
        """The final report; beside it, the same as JSON."""
        return self.path / "report.md"

    @property
    def audit(self) -> Path:
        """What `dpshard audit` proved about the settings of the run."""
        return self.path / "audit.json"

    def settings(self) -> TrainSettings:
        """The settings of the run."""
        try:
            return resolve(read_yaml(self.config))
        except ConfigurationError as error:
            raise RunFolderError(f"{self.config} was damaged or edited: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder at the same time."""
        with _explained(self.path):
            lock = (self.path / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(f"Another process is training in {self.path}: wait for it, or stop it.") from error
            yield

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl."""
        with _explained(self.path):
            lines = self.metrics.read_bytes().splitlines(keepends=True)
        with intact(self.metrics, "restore it from a copy"):
            rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
            for number, row in enumerate(rows, 1):
                if not (isinstance(row, dict) and is_count(row.get("step"))):
                    raise ValueError(f"line {number} is of no step")
            return rows

    def _sound_metrics(self, steps: int) -> list[dict[str, Any]]:
        """The rows that can be read, of `steps` at least; a warning if some cannot."""
        with _explained(self.path):
            lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.exists() else []
        rows = [row for row in map(_row, lines) if row is not None]
        if len({row["step"] for row in rows}) < steps:
            warnings.warn(
                f"{self.metrics} is missing or damaged: {len(rows)} of its lines can be read, after {steps} steps. "
                f"The training goes on; plots and metrics lack the other steps.",
                stacklevel=4,
            )
        return rows

    @contextmanager
    def append_metrics(self, *, after_step: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Cut the metrics back to the first `after_step` steps, and give a function that appends a row.

        Warns of lines that are damaged, and leaves them out: plots do without. A row is handed to the operating system
        at once: killing this process does not take it back.
        """
        kept = [row for row in self._sound_metrics(after_step) if row["step"] <= after_step]
        write_atomically(self.metrics, "".join(f"{to_json(row)}\n" for row in kept).encode())
        with _explained(self.path):
            file = self.metrics.open("a", encoding="utf-8")

        def append(row: Mapping[str, Any]) -> None:
            with _explained(self.path):
                file.write(f"{to_json(row)}\n")
                file.flush()

        with file:
            yield append


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `path` such that at every moment, also after a power cut, it is either the old file or the new one."""
    # A name of this process: two reports of one run may be written at once.
    beside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    with _explained(path):
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _row(line: bytes) -> dict[str, Any] | None:
    """A complete line of metrics; None for anything else."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_count(row.get("step")) else None


@contextmanager
def intact(path: Path, remedy: str) -> Iterator[None]:
    """A block that takes the content of `path` for what dpshard has written; RunFolderError if it turns out not to be.

    `remedy` says what to do then.
    """
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
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written or read: {why(error, path)}. Check the path, your rights to it, and the space "
            f"on the disk."
        ) from error
