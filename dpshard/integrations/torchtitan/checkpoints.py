"""The engine in torchtitan's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from dpshard.checkpoint.journal import Journal, Mark, ReleaseNotes
from dpshard.engine import PrivacyEngine
from dpshard.errors import CheckpointError


class EngineState:
    """The engine's state in torchtitan's checkpoints, with a journal beside them."""

    def __init__(self, engine: PrivacyEngine, folder: Path) -> None:
        self._engine = engine
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # a checkpoint holds the run secret
        self._journal = Journal(folder / "releases.journal")
        self._noted = self._journal.mark()
        self._notes = ReleaseNotes(self._journal)
        engine.internals.note_releases(self._note)

    def begin(self) -> None:
        """Make the journal, and warn of its releases that a run from step 0 does not count.

        Call it after loading, where a missing journal is one that was lost.
        """
        self._journal.create()
        if self._noted.entries and self._engine.step == 0:
            logger.warning(
                "%s has %d releases of earlier starts, of which there is no checkpoint. This run does not count them.",
                self._journal.path,
                self._noted.entries,
            )

    def _note(self, step: int, identity: bytes) -> Callable[[], object]:
        self._noted = self._noted.after(step, identity)  # the same on all ranks
        return self._notes.note(step, identity)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state, and its place in the journal."""
        return {"engine": json.dumps(self._engine.state_dict()), "noted": json.dumps(self._noted)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved run, and count the releases after it."""
        released = self._journal.since(Mark(*json.loads(state_dict["noted"])))
        if released is None:
            raise CheckpointError(
                f"{self._journal.path} is missing, damaged, or of another run: the releases after the checkpoint are "
                f"unknown, so they could not be counted. Restore the file, which lies beside the checkpoints."
            )
        self._engine.load_state_dict(json.loads(state_dict["engine"]), released=released)
