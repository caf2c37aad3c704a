"""The dispatch mode that detects communication in a forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveMode(TorchDispatchMode):
    """Calls `refuse(namespace, operator, in_parts)` for every operator; `in_parts` is True for DTensors.

    It allows operators among the ranks of a `known` group, or on DTensors of its mesh. `rows_only`: ranks with samples
    of their own may send each other only whole numbers and rows.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        refuse: Callable[[str, str, bool], None],
        known: Sequence[tuple[ProcessGroup, DeviceMesh | None]] = (),
        *,
        rows_only: bool = False,
    ) -> None:
        super().__init__()
        self._refuse, self._known, self._rows_only = refuse, known, rows_only

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_parts = any(issubclass(kind, DTensor) for kind in types)
        leaves = pytree.tree_leaves((args, kwargs)) if self._known else []
        if in_parts:
            placed = [x for x in leaves if isinstance(x, DTensor)]
            known = bool(self._known) and all(self._is_known_mesh(x.device_mesh) for x in placed)
        else:
            known = any(map(self._is_known_group, leaves)) if "c10d" in func.namespace else False
            known = known and (not self._rows_only or _sends_rows(func, leaves))
        if not known:
            self._refuse(func.namespace, func.__name__, in_parts)
        if in_parts:  # DTensor dispatches its local operators here again
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _is_known_mesh(self, mesh: DeviceMesh) -> bool:
        return any(mesh == own if own is not None else _is_of(mesh, group) for group, own in self._known)

    def _is_known_group(self, x: Any) -> bool:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            x = ProcessGroup.unbox(x)
        name = x.group_name if isinstance(x, ProcessGroup) else x
        return isinstance(name, str) and any(name == group.group_name for group, _ in self._known)


def _is_of(mesh: DeviceMesh, group: ProcessGroup) -> bool:
    return mesh.ndim == 1 and get_process_group_ranks(mesh.get_group()) == get_process_group_ranks(group)


def _sends_rows(func: Any, leaves: list[Any]) -> bool:
    if func.namespace.startswith("_c10d_functional") and func.__name__.startswith("all_to_all_single"):
        return True
    numbers = all(not (x.is_floating_point() or x.is_complex()) for x in leaves if isinstance(x, torch.Tensor))
    return numbers and "reduce" not in func.__name__
