"""Checkpoints on disk, with a digest of every file.

A checkpoint is written into `.step-N.partial`. After all ranks have flushed their files, rank 0 adds `manifest.json`
with sizes and SHA-256. Then it renames the folder to `step-N`, which is atomic. Removal renames it back first. Partial
folders are never read, and the next save removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpshard.checkpoint.disk import flush, open_private
from dpshard.checkpoint.engine_state import digest_of
from dpshard.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"

Digests = dict[str, tuple[int, str]]
"""Size in bytes, and SHA-256 in hex, by name."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run."""

    path: Path

    def complete(self) -> list[int]:
        """Return the steps with a complete checkpoint, newest first."""
        found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in self.path.glob("step-*")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.path / f"step-{step:08d}"

    def begin(self, step: int) -> Path:
        """Make an empty folder for its owner only; remove remains of killed saves."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial = self._partial(step)
        partial.mkdir(mode=0o700)
        return partial

    def publish(self, step: int, digests: Digests, facts: dict[str, Any], *, keep: int) -> None:
        """Complete the checkpoint; remove older ones except the newest `keep`."""
        partial, place = self._partial(step), self.of(step)
        body = {"format": FORMAT, "step": step, **facts, "files": digests}
        with open_private(partial / MANIFEST, "x") as file:
            json.dump({**body, "digest": digest_of(body)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        flush(partial)
        if place.exists():  # a checkpoint of this step from before a resume, or a damaged one
            aside = self.path / f".step-{step:08d}.old.partial"
            place.rename(aside)
            partial.rename(place)
            shutil.rmtree(aside)
        else:
            partial.rename(place)
        flush(self.path)
        # Later checkpoints are damaged, and must not count among the newest `keep`.
        for old in [s for s in self.complete() if s <= step][keep:]:
            self.of(old).rename(self._partial(old))
            shutil.rmtree(self._partial(old))

    def manifest(self, step: int) -> dict[str, Any]:
        """Return a manifest; CheckpointError if damaged."""
        path = self.of(step) / MANIFEST
        try:
            manifest = json.loads(path.read_text("utf-8"))
            body = {key: value for key, value in manifest.items() if key != "digest"}
            if manifest["digest"] != digest_of(body) or manifest["step"] != step:
                raise CheckpointError(f"{path} is damaged: its digest does not match.")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.parent} is not a checkpoint of dpshard, or is damaged: {error!r}.") from error
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path.parent} has format {manifest['format']!r}, this version of dpshard reads format {FORMAT}. "
                f"Use the version that wrote it."
            )
        missing = [name for name in manifest["files"] if not (path.parent / name).is_file()]
        if missing:
            raise CheckpointError(f"{path.parent} is damaged: {missing[0]} is missing.")
        return manifest

    def require_intact(self, step: int, files: Iterable[tuple[str, tuple[int, str]]]) -> None:
        """Raise CheckpointError unless the files have their sizes and digests."""
        for name, noted in files:
            path = self.of(step) / name
            if digest(path) != tuple(noted):
                raise CheckpointError(f"{path} is damaged: its size or digest does not match.")

    def _partial(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.partial"


def digest(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
