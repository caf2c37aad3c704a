"""Reads and writes by torch.distributed.checkpoint, without executing code from a file.

torch pickles the table of contents and all values except tensors. They are read first by unpicklers that allow only
plain values.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dpshard.backends.ranks import Ranks
from dpshard.checkpoint.disk import why
from dpshard.errors import CheckpointError, DpshardError

State = dict[str, Any]
"""Nested dicts with string keys; leaves are tensors, DTensors and `pack`ed values."""


def pack(value: Any) -> bytes:
    """Return values as bytes; CheckpointError if unsafe to read back."""
    stream = io.BytesIO()
    torch.save(value, stream)
    unpack(stream.getvalue())
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the packed value; its tensors are on the CPU."""
    try:
        return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"A checkpoint holds only tensors and plain values: {reason}. Convert the state to these."
        ) from error


def write(state: State, folder: Path, ranks: Ranks) -> None:
    """Write this rank's part of `state`; all ranks call it."""
    _know_that_one_process_suffices(ranks)
    with _explained(folder, "written"):
        dcp.save(state, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.alone)


def write_later(state: State, folder: Path, ranks: Ranks) -> Future[Any]:
    """Copy `state` now, and write it in a thread; return its future."""
    _know_that_one_process_suffices(ranks)
    # A custom writer's stager would alias tensors on the CPU.
    future = dcp.async_save(state, checkpoint_id=folder, process_group=ranks.group, no_dist=ranks.alone)
    assert isinstance(future, Future)
    return future


def finished(future: Future[Any], folder: Path) -> None:
    """Wait until a checkpoint is written; CheckpointError if that failed."""
    with _explained(folder, "written"):
        future.result()


def contents(folder: Path) -> Mapping[str, Any]:
    """Return the checkpoint's descriptions of its tensors and bytes, by name."""
    with _explained(folder, "read"):
        return _Reader(folder).read_metadata().state_dict_metadata


def read(state: State, folder: Path, ranks: Ranks, *, partly: bool = False) -> None:
    """Read the values named in `state`: tensors in place, others replaced.

    Raises CheckpointError, before a tensor changes, if names (unless `partly`) or shapes differ.
    """
    _know_that_one_process_suffices(ranks)
    with _explained(folder, "read"):
        dcp.load(
            state,
            storage_reader=_Reader(folder),
            planner=_Planner(partly),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            _TableOfContents(file).load()
        return super().read_metadata(*args, **kwargs)


class _TableOfContents(pickle.Unpickler):
    ALLOWED = frozenset(
        {
            "torch.Size",
            "torch.serialization._get_layout",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; CheckpointError for others."""
        if "." not in name:  # pickle would follow dots into what a module has imported
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            known = getattr(metadata, name, None) if module == metadata.__name__ else None
            described = isinstance(known, type) and known.__module__ == module
            if dtype or described or f"{module}.{name}" in self.ALLOWED:
                return super().find_class(module, name)
        raise CheckpointError(
            f"The table of contents of the checkpoint names {module}.{name}, which may run code, so dpshard does not "
            f"read it. Resume from a checkpoint that dpshard wrote."
        )


class _Planner(DefaultLoadPlanner):
    def __init__(self, partly: bool) -> None:
        super().__init__()
        self.partly = partly

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        unpack(value.getvalue())
        super().load_bytes(read_item, value)

    def create_local_plan(self) -> Any:
        """Return the plan of this rank, after a comparison of `state` with the saved one."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for name, own in self.state_dict.items():
            if name not in saved:
                raise CheckpointError(
                    f"{name} is not in the checkpoint, which belongs to another model, optimizer or set of named "
                    f"objects. Resume with the saved ones."
                )
            described = saved[name]
            if isinstance(own, torch.Tensor) != isinstance(described, TensorStorageMetadata) or (
                isinstance(described, TensorStorageMetadata)
                and (described.size, described.properties.dtype) != (own.size(), own.dtype)
            ):
                raise CheckpointError(
                    f"{name} does not fit: saved {_spoken(described)}, now "
                    f"{f'{tuple(own.shape)} {own.dtype}' if isinstance(own, torch.Tensor) else type(own).__name__}."
                )
        return replace(super().create_local_plan(), planner_data=list(self.state_dict))

    def create_global_plan(self, global_plan: Any) -> Any:
        """Return the plans, after a comparison of the saved names with those of all ranks."""
        assert self.metadata is not None
        read = {name for plan in global_plan for name in plan.planner_data}
        more = [] if self.partly else sorted(self.metadata.state_dict_metadata.keys() - read)
        if more:
            raise CheckpointError(
                f"{more[0]} is in the checkpoint, but not in this training: the checkpoint belongs to another model, "
                f"optimizer or set of named objects. Resume with the saved ones."
            )
        return super().create_global_plan(global_plan)


def _spoken(described: Any) -> str:
    if isinstance(described, TensorStorageMetadata):
        return f"{tuple(described.size)} {described.properties.dtype}"
    return "not a tensor"


@contextmanager
def _explained(folder: Path, verb: str) -> Iterator[None]:
    what = f"The checkpoint {folder} cannot be {verb}"
    try:
        yield
    except CheckpointException as error:  # a BaseException, with one error for each failed rank
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, DpshardError):
            raise cause from None
        raise CheckpointError(f"{what} (rank {rank}): {why(cause, folder)}.") from cause
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{what}: {why(error, folder)}.") from error


def _know_that_one_process_suffices(ranks: Ranks) -> None:
    if ranks.alone:  # warning filters are global, and a thread may be writing
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
