"""The sums released at each step, so that a repeated step is counted correctly.

[Note: What a step that is taken again costs]
A keyed digest of step and sums is the identity of a release. A repeated release costs nothing ([Note: Equal sums, equal
noise] in noise/digest.py). A step with another or forgotten identity is charged ([Note: Copies of a step share their
batch] in spans.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from dpshard.errors import CheckpointError

MEMORY = 2**16
"""Number of remembered steps; they take about 20 MiB."""

NAME, OWN = 6, 10
"""Bytes of an identity: first the previous release's name, then its own part, which begins with its name."""


def succeeds(identity: bytes, previous: bytes) -> bool:
    """Return True if the release `identity` directly follows the release `previous`."""
    return identity[:NAME] == previous[NAME : 2 * NAME] != b""


class History:
    """Known releases of a run: of the loaded state, and of this process."""

    def __init__(self) -> None:
        self.end = 0
        """The first step without a known release."""
        self._loaded: dict[int, set[bytes]] = {}
        self._own: dict[int, set[bytes]] = {}
        self._tip = b""  # identity of the last counted release, if known
        self._own_tip = b""  # of this process
        self._own_place = b""  # digest of all releases of this process, in order
        self._place = b""  # digest of all counted releases, in order
        self._base = b""  # place of the loaded state whose releases are counted
        self._visited = {b"": b""}  # former places with their bases

    def of_other_run(self) -> History:
        """Return an empty history for another run of this process."""
        history = History()
        if self._own_place:
            history._own_place, history._visited, history._own_tip = self._own_place, {}, self._own_tip
        return history

    def contains(self, step: int, identity: bytes) -> bool:
        """Return True if this release is known and counted."""
        return identity in self._loaded.get(step, ()) or self.is_own(step, identity)

    def was_released(self, step: int) -> bool:
        """Return True if any release of `step` is known."""
        return step < self.end or step in self._own

    def is_own(self, step: int, identity: bytes) -> bool:
        """Return True if this process made this release."""
        return identity in self._own.get(step, ())

    def follows(self, identity: bytes, *, of_own: bool = False) -> bool:
        """Return True if this release follows the last counted one; with `of_own`, the last one of this process."""
        own = not self._own_place or succeeds(identity, self._own_tip)
        return own and (of_own or succeeds(identity, self._tip))

    def add(self, step: int, identity: bytes | None, *, counts: bool = True) -> None:
        """Remember a release; `identity` is None for unknown sums. `counts`: it was not counted before."""
        self.end = max(self.end, step + 1)
        known = self._own.setdefault(step, set())
        if identity is not None:
            known.add(identity)
        if len(self._own) > MEMORY:
            del self._own[next(iter(self._own))]
        facts = step.to_bytes(8, "little") + (identity or b"")
        self._own_place, self._own_tip = hashlib.sha256(self._own_place + facts).digest(), identity or b""
        if counts:
            self._tip = self._own_tip
            self._go_to(hashlib.sha256(self._place + facts).digest())

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the place before `step`, and the known releases after it, as plain JSON."""
        ahead = {str(n): sorted(x.hex() for x in self._known(n)) for n in range(step, self.end)}
        return {"place": self._place.hex(), "tip": self._tip.hex(), "ahead": ahead}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> bool:
        """Go to the place of a state before `step`; return True if all its releases are counted already.

        They are counted if this process was at this place, and has loaded no state without some of them since.
        Otherwise, they replace the releases of the last loaded state.

        Raises CheckpointError, without any change, for a damaged state.
        """
        try:
            place, tip = bytes.fromhex(state["place"]), bytes.fromhex(state.get("tip", ""))
            ahead = {int(n): {bytes.fromhex(x) for x in known} for n, known in state["ahead"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"The history of the checkpoint is damaged ({error}): steps might be released twice, but counted once. "
                f"Resume from an older checkpoint."
            ) from error
        if not (visited := self._visited.get(place) in (b"", self._base)):
            self.end, self._loaded, self._base, self._tip = 0, {}, place, tip
            self._go_to(place)
            if self._own_place:
                self._go_to(hashlib.sha256(self._own_place + place).digest())
        self.end = max(self.end, step)
        for n, known in ahead.items():
            self.end = max(self.end, n + 1)
            self._loaded.setdefault(n, set()).update(known)
        return visited

    def _known(self, step: int) -> set[bytes]:
        return self._loaded.get(step, set()) | self._own.get(step, set())

    def _go_to(self, place: bytes) -> None:
        self._place = place
        self._visited[place] = self._base
        if len(self._visited) > MEMORY:
            del self._visited[next(iter(self._visited))]
