"""The engine's interface for the optimizer hook, Checkpointer and audits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpshard.accounting import PrivacyLedger
from dpshard.backends import Backend, require_one_training
from dpshard.step.collector import Collector

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

NoteRelease = Callable[[int, bytes], Callable[[], object]]
"""Takes step and identity before a release, and returns a function to call before its end."""


class Internals:
    """Parameters, gradients and releases of an engine."""

    def __init__(self, backend: Backend, collector: Collector, ledger: PrivacyLedger) -> None:
        self._backend, self._collector, self._ledger = backend, collector, ledger
        self._notes: list[NoteRelease] = []

    @property
    def has_extra_releases(self) -> bool:
        """True if steps were taken again, or are counted ahead: the run costs more than its first steps."""
        return self._ledger.releases > self._ledger.steps

    def owned(self) -> set[Tensor]:
        """Private parameters, and their stand-ins."""
        return self._backend.sharding.held

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate an optimizer's closure; raise LogicalBatchError if a backward came before it."""
        return self._collector.evaluate(closure)

    def install_gradients(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer of `held` reads them."""
        self._backend.gradients.install(held)

    def note_releases(self, note: NoteRelease) -> None:
        """Call `note` for every later release."""
        self._notes.append(note)

    def note(self, step: int, identity: bytes) -> list[Callable[[], object]]:
        """Note a release; return functions that wait for the disk."""
        return [note(step, identity) for note in self._notes]

    def training_state(self, optimizer: Any) -> TrainingState:
        """Return model and optimizer as a Checkpointer saves them."""
        require_one_training(self._backend.communicator.world_size)
        return self._backend.sharding.training_state(optimizer)

    def require_rest(self) -> None:
        """Raise LogicalBatchError unless the engine is between logical batches."""
        self._collector.require_rest()

    def full_gradient(self, name: str) -> Tensor | None:
        """Whole private gradient of a trainable parameter, on every rank, if it has one.

        All ranks must call it between `privatize()` and the optimizer's step, in one order. Raise LogicalBatchError if
        gradients are not private.
        """
        self._collector.require_private()
        return self._backend.gradients.full_gradient(name)

    def full_value(self, name: str) -> Tensor:
        """Return a whole trainable parameter; all ranks call it."""
        return self._backend.sharding.full_value(name)
