"""Counts of a step on fake tensors.

[Note: Fake tensors and their values]
The step reads some values, for example to test a norm. `UnreadValues` gives False or 0 for those of fake tensors only.
So it cannot weaken a check in training.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpshard.applications.flops import FORMULAS
from dpshard.applications.planner.counts import ACTIVATIONS, GRADIENTS, PARAMETERS, RECORDS, Change, Counts, Memory
from dpshard.applications.planner.timeline import Event
from dpshard.errors import ConfigurationError

_aten = torch.ops.aten

_KINDS = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce", "all_reduce"),
    "broadcast": ("broadcast",),
}
_SILENT = ("wait_tensor", "barrier", "monitored_barrier")


class UnreadValues(TorchDispatchMode):
    """See [Note: Fake tensors and their values]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        return func(*args, **(kwargs or {}))


class Meter(TorchDispatchMode):
    """Counts operations on tensors of one fake mode; enter it before you build the model."""

    def __init__(self, fake: FakeTensorMode, node: int = 8) -> None:
        super().__init__()
        self.fake, self.node = fake, node
        self.phase = "forward"
        self.waited: list[int] = []
        self._log: list[Event | Change] = []
        self._live: dict[int, Memory] = {}

    @property
    def counts(self) -> Counts:
        """Counts since the last restart."""
        return Counts.read((*self._log, Event(self.phase)))

    def restart(self) -> None:
        """Reset the counts."""
        live = list(self._live.values())
        self._log = [*((m, None) for m in live if m.recorded), *((m, m.nbytes) for m in live)]

    def begin(self, phase: str) -> None:
        """Begin a phase with an event."""
        self._log.append(Event(self.phase))
        self.phase = phase

    def label(self, tensors: Iterable[Any], part: str) -> None:
        """Set the part of `tensors`; only an activation becomes a record."""
        for x in tensors:
            local = x._local_tensor if isinstance(x, DTensor) else x
            if not self._is_ours(local):
                continue
            memory = self._find(local.untyped_storage(), part)
            if part != RECORDS:
                memory.part = part
            elif not memory.recorded and memory.part == ACTIVATIONS:
                memory.recorded = True
                self._log.append((memory, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, result)
        formula = FORMULAS.get(func._overloadpacket)
        outputs = [x for x in tree_leaves(result) if self._is_ours(x)]
        if formula is not None and outputs:
            self._log.append(Event(self.phase, formula(*args, **kwargs, out_val=result)))
        for x in outputs:
            self._find(x.untyped_storage(), ACTIVATIONS)
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            self.label(kwargs["out"], PARAMETERS)
            self._log.append(Event(self.phase, kind="use"))
        elif func is torch.ops.fsdp.chunk_cat.default:
            self.label([*args[0], kwargs["out"]] if args else [*kwargs["tensors"], kwargs["out"]], GRADIENTS)
        return result

    def _count_collective(self, func: Any, args: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        kind = next((kind for kind, prefixes in _KINDS.items() if name.startswith(prefixes)), None)
        if kind is None:
            if name in _SILENT:
                return
            raise ConfigurationError(
                f"The plan cannot count the collective {name}: the planner does not support it yet."
            )
        # The larger one is whole.
        sides = [[x for x in tree_leaves(side) if isinstance(x, Tensor)] for side in (*args, result)]
        tensors = [x for side in sides for x in side]
        nbytes = max(sum(x.numel() * x.element_size() for x in side) for side in sides)
        members = dist.get_process_group_ranks(_group(args))
        self._log.append(
            Event(
                self.phase,
                kind=kind,
                dtype=str(tensors[0].dtype).removeprefix("torch."),
                nbytes=nbytes,
                ranks=len(members),
                within_node=members[0] // self.node == members[-1] // self.node,
                waits=self.phase == "update" or members == self.waited,
            )
        )
        self.label(tensors, PARAMETERS if kind == "all-gather" else GRADIENTS)

    def __enter__(self) -> Meter:
        # FSDP resizes the storage of gathered parameters, which dispatch modes miss.
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if (known := self._live.get(storage._cdata)) is not None:
                self._log.append((known, nbytes - known.nbytes))
                known.nbytes = nbytes
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _is_ours(self, x: Any) -> bool:
        return isinstance(x, FakeTensor) and x.fake_mode is self.fake

    def _find(self, storage: torch.UntypedStorage, part: str) -> Memory:
        key = storage._cdata
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = Memory(storage.nbytes(), part)
            known.reference = weakref.ref(storage, lambda _: self._forget(key))
            self._log.append((known, known.nbytes))
        return known

    def _forget(self, key: int) -> None:
        memory = self._live.pop(key)
        self._log.append((memory, -memory.nbytes))


def _group(args: Any) -> Any:
    names = [x for x in args if isinstance(x, str)]
    if names:  # the last one, after a reduction
        return dist.distributed_c10d._resolve_process_group(names[-1])  # pyright: ignore[reportArgumentType]
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return dist.ProcessGroup.unbox(x)
    raise ConfigurationError("The plan found a collective without a process group.")
