"""Checkpointer: a training that can be killed at any moment, and goes on, on as many ranks as there are then."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpshard.backends.ranks import Ranks
from dpshard.backends.training_state import Snapshot, TrainingState
from dpshard.checkpoint import engine_state, storage
from dpshard.checkpoint.folders import CheckpointFolder, Digests, digest
from dpshard.config import Mechanism
from dpshard.errors import CheckpointError, ConfigurationError


class Stateful(Protocol):
    """Whatever has a state: a learning-rate scheduler, a counter, an average of the weights."""

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""
        ...


class _Engine(Stateful, Protocol):
    mechanism: Mechanism

    @property
    def step(self) -> int: ...

    def require_rest(self) -> None: ...

    def training_state(self, optimizer: Any) -> TrainingState: ...


class Checkpointer:
    """Saves and resumes a private training: model, optimizer, account, run secret and place in the sampling.

    Written by torch.distributed.checkpoint, every rank its own shards: what 4 ranks of FSDP2 have saved goes on with 2,
    in DistributedDataParallel, with DeepSpeed, or in one process. A checkpoint counts once it is complete; a damaged
    one is passed over. It holds the run secret, so its folder is for its owner alone: keep it as you keep the data.

    With several ranks each makes one, and calls its methods at the same time as the others.

    Args:
        folder: Where checkpoints are, on a disk that all ranks share; made if need be.
        engine: The engine of the training; its model is saved with it.
        optimizer: The optimizer that the engine privatizes; with DeepSpeed, what deepspeed.initialize() returns.
        keep: How many of the newest checkpoints stay.
        others: What else has a state, by name: `scheduler=scheduler`. The state is the same on all ranks, or sharded in
            DTensors.

    Raises:
        ConfigurationError: if `keep` is below 1, a named object has no state, or DeepSpeed steps with another optimizer
            or offloads a part of it.
    """

    def __init__(
        self, folder: str | Path, engine: _Engine, optimizer: Optimizer, *, keep: int = 2, **others: Stateful
    ) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep={keep}: at least one checkpoint must stay.")
        for name, thing in others.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ConfigurationError(f"{name}={thing!r} has no state_dict() and load_state_dict(): leave it out.")
        self._folder = CheckpointFolder(Path(folder))
        self._engine, self._state, self._others = engine, engine.training_state(optimizer), others
        self._keep = keep
        self._ranks = Ranks()
        self._thread = ThreadPoolExecutor(1, "dpshard-checkpoint")
        self._pending: Future[None] | None = None

    def save(self, *, wait: bool = True) -> Path:
        """Save the state between two steps; where the checkpoint is, or will be.

        With `wait=False` only copies are made now, and written while the training goes on; an error is raised by the
        next call. Raises CheckpointError if it cannot be written.
        """
        self.wait()
        step = self._engine.step
        state: storage.State = {
            "engine": storage.pack(json.dumps(self._engine.state_dict())),
            "others": self._states_of_others(),
            **_named(self._state.snapshot()),
        }
        partial = self._ranks.on_first(_explained(lambda: self._folder.begin(step)))
        if wait:
            storage.write(state, partial, self._ranks)
            self._publish(step, partial)
        else:
            written = storage.write_later(state, partial, self._ranks)
            self._pending = self._thread.submit(self._finish, written, step, partial)
        return self._folder.of(step)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; CheckpointError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self) -> bool:
        """Go back to the newest checkpoint; False if there is none.

        One that is damaged draws a warning, and the one before is taken: its steps are replayed with the same samples
        and the same noise. Raises CheckpointError, before anything changes, if none is sound, or if it belongs to
        another mechanism, model or optimizer; LogicalBatchError in the middle of a logical batch.
        """
        self.wait()
        self._engine.require_rest()
        step = self._newest()
        if step is None:
            return False
        path = self._folder.of(step)
        head: storage.State = {"engine": b"", "optimizer": {"param_groups": b""}}
        storage.read(head, path, self._ranks, partly=True)
        saved = json.loads(storage.unpack(head["engine"]))
        engine_state.unpack(saved, self._engine.mechanism)
        others = self._states_of_others()
        groups = storage.unpack(head["optimizer"]["param_groups"])
        with self._state.receiving(storage.contents(path), groups) as place:
            storage.read({"engine": b"", "others": others, **_named(place)}, path, self._ranks)
        for name, thing in self._others.items():
            thing.load_state_dict(storage.unpack(others[name]) if isinstance(others[name], bytes) else others[name])
        self._engine.load_state_dict(saved)
        return True

    def _states_of_others(self) -> storage.State:
        return {name: _portable(thing.state_dict()) for name, thing in self._others.items()}

    def _newest(self) -> int | None:
        """The newest sound checkpoint: ranks share the work of checking."""
        complaints: list[str] = []
        for step in self._ranks.on_first(self._folder.complete):
            complaint = self._complaint(step)
            if complaint is None:
                if complaints:
                    warnings.warn(f"{complaints[0]} Going on from {self._folder.of(step).name}.", stacklevel=3)
                return step
            complaints.append(complaint)
        if complaints:
            raise CheckpointError(f"{complaints[0]} There is no other to resume from: start a new run.")
        return None

    def _complaint(self, step: int) -> str | None:
        def check() -> None:
            files = sorted(self._folder.manifest(step)["files"].items())
            self._folder.check(step, files[self._ranks.rank :: self._ranks.size])

        try:
            self._ranks.everywhere(_explained(check))
        except CheckpointError as error:
            return str(error)
        return None

    def _finish(self, written: Future[Any], step: int, partial: Path) -> None:
        storage.finished(written, partial)
        self._publish(step, partial)

    def _publish(self, step: int, partial: Path) -> None:
        parts = self._ranks.everywhere(_explained(lambda: _own_digests(partial, self._ranks.rank)))
        digests = {name: noted for part in parts for name, noted in part.items()}
        facts = {"ranks": self._ranks.size, "torch": torch.__version__}
        self._ranks.on_first(_explained(lambda: self._folder.publish(step, digests, facts, keep=self._keep)))


def _own_digests(partial: Path, rank: int) -> Digests:
    """Of the files that this rank has written; rank 0 has written the table of contents, too."""
    files = [*partial.glob(f"__{rank}_*"), *([partial / ".metadata"] if rank == 0 else [])]
    for path in files:
        path.chmod(0o600)
    return {path.name: digest(path) for path in files}


def _named(snapshot: Snapshot) -> storage.State:
    groups = storage.pack(snapshot.groups)
    return {"model": snapshot.model, "optimizer": {"state": snapshot.remembered, "param_groups": groups}}


def _portable(state: dict[str, Any]) -> Any:
    """A state with tensors as it is: they may be sharded. Else packed, since nested keys need not be strings."""
    return state if _holds_tensors(state) else storage.pack(state)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)


def _explained(work: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return work()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or 'A file'} cannot be written or read: {error.strerror}."
            ) from error

    return run
