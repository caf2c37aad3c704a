"""A forward through a mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpshard.interception.mode import InterceptionMode

if TYPE_CHECKING:
    from dpshard.interception.patching import Interception


class ActiveMode:
    """Enter a mode; modules called meanwhile run as they are."""

    def __init__(self, owner: Interception, mode: InterceptionMode) -> None:
        self.owner, self.mode = owner, mode

    def __enter__(self) -> None:
        self.before = (self.owner.active, self.owner.mode)
        self.owner.active, self.owner.mode = True, self.mode
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        self.owner.active, self.owner.mode = self.before
