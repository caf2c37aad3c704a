"""The keys of past noise, for runs in which the noise of a step depends on all sums before it.

[Note: A chain of sums] Correlated noise of step t has vectors z_t, z_{t-1}, ..., drawn again from the keys of their
steps. Suppose the key of z_t depended only on step t and its sums. Take two branches of a run (after a rewind) with
other sums at step s and equal ones at t > s. They would share z_t. Then the difference of their rows t of C S + Z has
no noise, but the sums of step s. (Two empty batches suffice.) So the key of a step, its *link*, is derived from its
sums and the link before. Links are equal for equal sums on the whole path, and otherwise independent.

A release repeats an earlier one, and costs nothing, only if all sums on the path to it are equal. Its identity is 16
bytes. 6 name the release before it, and 10 are its own; the first 6 of these name it. So a journal, which holds only
identities, shows where a run branched (accounting/history.py).
"""

from __future__ import annotations

from typing import Any

from dpshard.accounting.history import NAME, OWN
from dpshard.errors import CheckpointError
from dpshard.randomness import SECRET_BYTES, derive_key


class Chain:
    """The links of the last steps of one path; see [Note: A chain of sums]."""

    def __init__(self, memory: int) -> None:
        self._memory = max(1, memory)
        self._links: list[bytes] = []  # the newest last

    def next(self, secret: bytes, sums: tuple[str | int, ...]) -> tuple[bytes, bytes]:
        """Return link and identity of a step with these `sums` after the last one."""
        before = self._before(secret)
        link = derive_key(secret, "link", before.hex(), *sums)
        return link, _named(secret, before)[:NAME] + _named(secret, link)

    def append(self, link: bytes) -> None:
        """Take a step."""
        self._links = [*self._links, link][-self._memory :]

    def last(self, n: int) -> list[bytes]:
        """Return the last `n` links, the newest first."""
        return self._links[: -n - 1 : -1] if n else []

    def _before(self, secret: bytes) -> bytes:
        return self._links[-1] if self._links else derive_key(secret, "first link")

    def state_dict(self) -> list[str]:
        """Return the links as plain JSON; they are as secret as the run secret."""
        return [link.hex() for link in self._links]

    def load_state_dict(self, state: Any, step: int) -> None:
        """Go to the place of a `state_dict()` before `step`; raise CheckpointError if it lacks a link."""
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
