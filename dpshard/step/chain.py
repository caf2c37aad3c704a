"""The keys of past noise, for runs in which the noise of a step depends on all sums before it.

[Note: A chain of sums] Correlated noise of step t draws z_t, z_{t-1}, ... again from their steps' keys. Suppose the key
of z_t depended only on step t and its sums. Two branches of a run with different sums at step s, but equal ones at t >
s, would share z_t. Then the difference of their rows t of C S + Z would show the sums of step s without noise. So a
step's key, its *link*, is derived from its sums and the link before.

A release repeats an earlier one, at no cost, only if all sums on the path to it are equal. Its identity has 6 bytes of
the release before it, and 10 of its own (accounting/history.py).
"""

from __future__ import annotations

from typing import Any

from dpshard.accounting.history import NAME, OWN
from dpshard.errors import CheckpointError
from dpshard.randomness import SECRET_BYTES, derive_key


class Chain:
    """The last links of one path."""

    def __init__(self, memory: int) -> None:
        self._memory = max(1, memory)
        self._links: list[bytes] = []

    def next(self, secret: bytes, sums: tuple[str | int, ...]) -> tuple[bytes, bytes]:
        """Return the link and the identity of a step with these sums."""
        before = self._before(secret)
        link = derive_key(secret, "link", before.hex(), *sums)
        return link, _named(secret, before)[:NAME] + _named(secret, link)

    def append(self, link: bytes) -> None:
        """Add the link of a released step."""
        self._links = [*self._links, link][-self._memory :]

    def last(self, n: int) -> list[bytes]:
        """Last `n` links, the newest first."""
        return self._links[: -n - 1 : -1] if n else []

    def _before(self, secret: bytes) -> bytes:
        return self._links[-1] if self._links else derive_key(secret, "first link")

    def state_dict(self) -> list[str]:
        """Links as plain JSON; they are as secret as the run secret."""
        return [link.hex() for link in self._links]

    def load_state_dict(self, state: Any, step: int) -> None:
        """Load a `state_dict()` saved before `step`; raise CheckpointError if it lacks a link."""
        try:
            links = [bytes.fromhex(link) for link in state]
        except (TypeError, ValueError):
            links = []
        if len(links) != min(step, self._memory) or any(len(link) != SECRET_BYTES for link in links):
            raise CheckpointError(
                f"The checkpoint lacks the keys of the noise before step {step + 1}, so the noise of its next steps "
                f"would differ from that of the run. Resume from another checkpoint."
            )
        self._links = links


def _named(secret: bytes, link: bytes) -> bytes:
    return derive_key(secret, "release", link.hex())[:OWN]
