"""Checkpoints of a whole training, which survives a kill at any moment, and resumes on any number of ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpshard.accounting.mechanism import Mechanism
from dpshard.backends.ranks import Ranks
from dpshard.backends.training_state import Snapshot, TrainingState
from dpshard.checkpoint import engine_state, storage
from dpshard.checkpoint.disk import explained
from dpshard.checkpoint.folders import CheckpointFolder, Digests, digest
from dpshard.checkpoint.journal import Journal, Mark, Release, ReleaseNotes
from dpshard.errors import CheckpointError, ConfigurationError

T = TypeVar("T")


class Stateful(Protocol):
    """An object with a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""
        ...


class _Internals(Protocol):
    def note_releases(self, note: Callable[[int, bytes], Callable[[], object]]) -> None: ...

    def require_rest(self) -> None: ...

    def training_state(self, optimizer: Any) -> TrainingState: ...


class _Engine(Protocol):
    mechanism: Mechanism

    @property
    def internals(self) -> _Internals: ...

    @property
    def step(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(
        self, state: dict[str, Any], *, released: int | Sequence[tuple[int, bytes]] | None = None
    ) -> Any: ...


class Checkpointer:
    """Saves and resumes a private training: model, optimizer, ledger, run secret and place in the sampling.

    A state saved by 4 ranks of FSDP2 resumes on 2, under DDP, with DeepSpeed, or in one process. Damaged checkpoints
    are skipped. A checkpoint holds the run secret, so only its owner can read it: protect it like the data. A journal
    beside it counts the releases that a crash forgets. All ranks make a Checkpointer, and call its methods together.

    Args:
        folder: Folder on a disk that all ranks share; created if missing.
        engine: The engine; its model is saved with it.
        optimizer: The engine's optimizer; with DeepSpeed, the result of deepspeed.initialize().
        keep: Number of newest checkpoints to keep.
        others: Other objects with a state, by name: `scheduler=scheduler`. States are equal on all ranks, or sharded in
            DTensors.

    Raises:
        ConfigurationError: if `keep` < 1, an object has no state, or DeepSpeed steps with another or offloaded
            optimizer.
    """

    def __init__(
        self, folder: str | Path, engine: _Engine, optimizer: Optimizer, *, keep: int = 2, **others: Stateful
    ) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep={keep}: keep at least one checkpoint. Pass keep=1 or more.")
        for name, thing in others.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigurationError(f"{name}={thing!r} has no state_dict() and load_state_dict(): leave it out.")
        self._folder = CheckpointFolder(Path(folder))
        self._engine, self._state, self._others = engine, engine.internals.training_state(optimizer), others
        self._keep = keep
        self._ranks = Ranks()
        self._thread = ThreadPoolExecutor(1, "dpshard-checkpoint")
        self._pending: Future[None] | None = None
        self._journal = Journal(Path(folder) / "releases.journal")
        self._found = self._ranks.on_first(self._explained(lambda: self._journal.mark().entries))  # of earlier starts
        engine.internals.note_releases(ReleaseNotes(self._journal).note)

    def save(self, *, wait: bool = True) -> Path:
        """Save the state between two steps; return the path of the (future) checkpoint.

        With `wait=False`, copy now and write while the training continues; the next call raises its errors. Raises
        CheckpointError if it cannot be written, or another process trains in the folder.
        """
        self.wait()
        step = self._engine.step
        state: storage.State = {
            "engine": storage.pack(json.dumps(self._engine.state_dict())),
            "others": self._states_of_others(),
            **_named(self._state.snapshot()),
        }

        def begin() -> tuple[Mark, Path]:
            self._journal.create()
            return self._journal.mark(), self._folder.begin(step)

        noted, partial = self._ranks.on_first(self._explained(begin))
        if wait:
            storage.write(state, partial, self._ranks)
            self._publish(step, noted, partial)
        else:
            written = storage.write_later(state, partial, self._ranks)
            self._pending = self._thread.submit(self._finish, written, step, noted, partial)
        return self._folder.of(step)

    def wait(self) -> None:
        """Wait for the last checkpoint. Raises CheckpointError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, *, released: int | None = None) -> bool:
        """Go back to the newest sound checkpoint; return False without one.

        Releases of later steps are counted from the journal, else pass `released`, the total number of released steps.
        Repeating a step with the same sums costs nothing more; other sums are charged. Raises CheckpointError, and
        changes nothing, if all are damaged, or the newest sound one is of another mechanism, model or optimizer. Raises
        LogicalBatchError in the middle of a logical batch.
        """
        self.wait()
        self._engine.internals.require_rest()
        step = self._newest()
        if step is None:
            self._warn_of_earlier_starts()
            return False
        path = self._folder.of(step)
        head: storage.State = {"engine": b"", "optimizer": {"param_groups": b""}}
        storage.read(head, path, self._ranks, partly=True)
        saved = json.loads(storage.unpack(head["engine"]))
        account = engine_state.unpack(saved, self._engine.mechanism).account
        engine_state.require_released(released, account)
        counted = self._releases_since(step) if released is None else released
        self._require_agreement(step, counted)
        others = self._states_of_others()
        groups = storage.unpack(head["optimizer"]["param_groups"])
        with self._state.receiving(storage.contents(path), groups) as place:
            storage.read({"engine": b"", "others": others, **_named(place)}, path, self._ranks)
        for name, thing in self._others.items():
            thing.load_state_dict(storage.unpack(others[name]) if isinstance(others[name], bytes) else others[name])
        self._engine.load_state_dict(saved, released=counted)
        return True

    def _warn_of_earlier_starts(self) -> None:
        if self._found and self._engine.step == 0:
            warnings.warn(
                f"{self._journal.path} has {self._found} releases of earlier starts without a checkpoint. This "
                f"run does not count them. If anyone saw their results, count them by PrivacyEngine(earlier=...).",
                stacklevel=3,
            )

    def _require_agreement(self, step: int, released: int | list[Release] | None) -> None:
        """Raise CheckpointError, before a tensor changes, unless ranks load one checkpoint."""
        manifest = self._folder.manifest(step)
        if any(other != (manifest["digest"], released) for other in self._ranks.gather((manifest["digest"], released))):
            raise CheckpointError(
                f"Ranks have different checkpoints of step {step}, or pass different released=. They would train with "
                f"parameters of several runs. Give all ranks one folder, on a disk that they share."
            )

    def _releases_since(self, step: int) -> list[Release] | None:
        def read() -> list[Release] | None:
            manifest = self._folder.manifest(step)
            return self._journal.since(Mark(manifest["releases"], manifest.get("newest_release", "")))

        releases = self._ranks.on_first(self._explained(read))
        if releases is None:
            warnings.warn(
                f"{self._journal.path} is missing, damaged or of another run: the releases after "
                f"{self._folder.of(step).name} are unknown. If there are any, count them by load(released=n), with n "
                f"steps in total; or restore the file.",
                stacklevel=3,
            )
        return releases

    def _states_of_others(self) -> storage.State:
        return {name: _portable(thing.state_dict()) for name, thing in self._others.items()}

    def _newest(self) -> int | None:
        complaints: list[str] = []
        for step in self._ranks.on_first(self._folder.complete):
            complaint = self._complaint(step)
            if complaint is None:
                if complaints:
                    warnings.warn(f"{complaints[0]} Resuming from {self._folder.of(step).name}.", stacklevel=3)
                return step
            complaints.append(complaint)
        if complaints:
            raise CheckpointError(f"{complaints[0]} There is no other checkpoint: start a new run.")
        return None

    def _complaint(self, step: int) -> str | None:
        def look() -> None:
            files = sorted(self._folder.manifest(step)["files"].items())
            self._folder.require_intact(step, files[self._ranks.rank :: self._ranks.size])

        try:
            self._ranks.everywhere(self._explained(look))
        except CheckpointError as error:
            return str(error)
        return None

    def _explained(self, work: Callable[[], T]) -> Callable[[], T]:
        return explained(self._folder.path, work)

    def _finish(self, written: Future[Any], step: int, noted: Mark, partial: Path) -> None:
        storage.finished(written, partial)
        self._publish(step, noted, partial)

    def _publish(self, step: int, noted: Mark, partial: Path) -> None:
        parts = self._ranks.everywhere(self._explained(lambda: _own_digests(partial, self._ranks.rank)))
        digests = {name: found for part in parts for name, found in part.items()}
        facts = {"ranks": self._ranks.size, "torch": torch.__version__, "releases": noted.entries}
        facts["newest_release"] = noted.newest
        self._ranks.on_first(self._explained(lambda: self._folder.publish(step, digests, facts, keep=self._keep)))


def _own_digests(partial: Path, rank: int) -> Digests:
    files = [*partial.glob(f"__{rank}_*"), *([partial / ".metadata"] if rank == 0 else [])]
    for path in files:
        path.chmod(0o600)
    return {path.name: digest(path) for path in files}


def _named(snapshot: Snapshot) -> storage.State:
    groups = storage.pack(snapshot.groups)
    return {"model": snapshot.model, "optimizer": {"state": snapshot.remembered, "param_groups": groups}}


def _portable(state: dict[str, Any]) -> Any:
    """Return a state with tensors unchanged, because they may be sharded; pack others, whose keys may have any type."""
    return state if _holds_tensors(state) else storage.pack(state)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)
