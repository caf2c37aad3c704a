"""The object `privacy_engine.accountant`."""

from __future__ import annotations

from dpshard.engine import PrivacyEngine


class Accountant:
    """The ledger of an engine; empty before `make_private`."""

    def __init__(self) -> None:
        self.engine: PrivacyEngine | None = None

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon so far at `delta`."""
        return 0.0 if self.engine is None else self.engine.epsilon(delta)

    def __len__(self) -> int:
        return 0 if self.engine is None else self.engine.step
