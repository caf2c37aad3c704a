"""Who trained on what, when, and with which code.

A fingerprint of the data lets an attacker, with all other samples, try out the last one. So no public page shows it.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpshard.applications.cli.run_folder import RunFolder, intact, write_json
from dpshard.applications.cli.settings import TrainSettings
from dpshard.errors import RunFolderError

if TYPE_CHECKING:
    from dpshard.applications.cli.data import Data


def record(folder: RunFolder, settings: TrainSettings, data: Data, *, resumed: bool) -> None:
    """Write the start of a run, or add a resume, which must read the same data."""
    if resumed and not folder.provenance.exists():
        return
    found, told = fingerprint(settings, data), read(folder)
    before = told.get("data")
    if None not in (before, found) and before != found:
        raise RunFolderError(
            f"{settings.data or settings.task} has changed since the run started (fingerprint {str(before)[:12]}, now "
            f"{str(found)[:12]}): a resumed run must train on the same data. Restore them, or start a new run."
        )
    start = author() | {"code": commit(Path.cwd()), "python": platform.python_version()}
    write_json(folder.provenance, {**told, "data": before or found, "starts": [*told.get("starts", []), start]})


def author() -> dict[str, Any]:
    """Return the time and the login name."""
    name = None
    with suppress(KeyError, OSError, ImportError):  # no name for this number, as in some containers
        name = getpass.getuser()
    return {"at": _now(), "by": name}


def conclude(folder: RunFolder) -> None:
    """Add when the run has finished."""
    told = read(folder)
    if told and "finished" not in told:
        write_json(folder.provenance, told | {"finished": _now()})


def read(folder: RunFolder) -> dict[str, Any]:
    """Return what was recorded, or {}."""
    if not folder.provenance.exists():
        return {}
    with intact(folder.provenance, "restore it from a copy, or remove it: the report will lack it"):
        found = json.loads(folder.provenance.read_bytes())
        for start in found.get("starts", []):
            datetime.fromisoformat(start["at"])
            if not all(start[name] is None or type(start[name]) is str for name in ("by", "code", "python")):
                raise ValueError("the description of a start must be text")
        datetime.fromisoformat(found.get("finished", "2026-01-01"))
        return found


def weights_digest(folder: RunFolder, recorded: str | None) -> str | None:
    """Return SHA-256 of model.pt, which must be the `recorded` one."""
    found = file_digest(folder.model) if folder.model.exists() else None
    if None not in (found, recorded) and found != recorded:
        raise RunFolderError(
            f"{folder.model} is not the file that training wrote (SHA-256 {str(found)[:12]}, then "
            f"{str(recorded)[:12]}): the report would describe other weights. Restore it from a copy."
        )
    return found or recorded


def fingerprint(settings: TrainSettings, data: Data) -> str | None:
    """Return SHA-256 of the file, folder or tensors; None if they cannot be read twice."""
    if (found := path_digest(settings.data)) is not None:
        return found
    splits = (data.train, data.validation, data.test)
    tensors = [tensor for split in splits for tensor in getattr(getattr(split, "dataset", split), "tensors", ())]
    return _digest(tensor.contiguous().numpy().tobytes() for tensor in tensors) if tensors else None


def path_digest(name: str | None) -> str | None:
    """Return SHA-256 of a file (as sha256sum), or of a folder's paths and files."""
    path = Path(name or "")
    if name is None or path.is_file() or not path.is_dir():
        return file_digest(path) if path.is_file() else None
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _digest(f"{file.relative_to(path).as_posix()}\n{file_digest(file)}\n".encode() for file in files)


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}. Check your permissions.") from error


def commit(folder: Path) -> str | None:
    """Return the git commit, "+ changes" if files differ from it."""
    options = ["--always", "--abbrev=40", "--exclude=*", "--dirty= + changes"]
    command = ["git", "-C", str(folder), "describe", *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
