"""The sums released at each step, so that a repeated step is counted correctly.

[Note: What a step that is taken again costs]
Noise is a function of step and sums ([Note: Equal sums, equal noise] in noise/digest.py). A keyed digest of both is the
identity of a release. Repeating it publishes the same value, and costs nothing. A step with another or forgotten
identity has independent noise, and is charged ([Note: Copies of a step share their batch] in copies.py). A history
remembers the last MEMORY steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from dpshard.errors import CheckpointError

MEMORY = 2**16
"""Remembered steps, about 20 MiB."""


class History:
    """The known releases of a run."""

    def __init__(self) -> None:
        self.end = 0
        """The first step without any release."""
        self._known: dict[int, set[bytes]] = {}
        self._place = b""  # digest of all counted releases, in order
        self._visited: dict[bytes, None] = {b"": None}  # former places

    def contains(self, step: int, identity: bytes) -> bool:
        """Return True if this release was made before."""
        return identity in self._known.get(step, ())

    def add(self, step: int, identity: bytes | None) -> None:
        """Remember a release; `identity` is None for unknown sums."""
        self.end = max(self.end, step + 1)
        known = self._known.setdefault(step, set())
        if identity is not None:
            known.add(identity)
        while len(self._known) > MEMORY:
            del self._known[next(iter(self._known))]
        self._go_to(hashlib.sha256(self._place + step.to_bytes(8, "little") + (identity or b"")).digest())

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the place before `step`, and the known releases from there on, as plain JSON."""
        ahead = {str(n): sorted(x.hex() for x in self._known.get(n, ())) for n in range(step, self.end)}
        return {"place": self._place.hex(), "ahead": ahead}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> bool:
        """Go to the place of a state before `step`; return True if this process has been there.

        Raises CheckpointError, without any change, for a damaged state.
        """
        try:
            place = bytes.fromhex(state["place"])
            ahead = {int(n): {bytes.fromhex(x) for x in known} for n, known in state["ahead"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The history of the checkpoint is damaged ({error}): steps might be released twice and be counted "
                f"once. Resume from an older checkpoint."
            ) from error
        if not (visited := place in self._visited):
            before = self._place
            self._go_to(place)
            if before:  # this process counted releases that the state lacks
                self._go_to(hashlib.sha256(before + place).digest())
        self.end = max(self.end, step)
        for n, known in ahead.items():
            self.end = max(self.end, n + 1)
            self._known.setdefault(n, set()).update(known)
        return visited

    def _go_to(self, place: bytes) -> None:
        self._place = place
        self._visited[place] = None
        if len(self._visited) > MEMORY:
            del self._visited[next(iter(self._visited))]
