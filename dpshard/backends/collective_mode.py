"""The dispatch mode that sees the communication of a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls `refuse(namespace, operator, in_parts)` for every operator; `in_parts` is True for DTensors."""

    supports_higher_order_operators = True

    def __init__(self, refuse: Callable[[str, str, bool], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_parts = any(issubclass(kind, DTensor) for kind in types)
        self._refuse(func.namespace, func.__name__, in_parts)
        if in_parts:  # DTensor dispatches its local operators here again
            return NotImplemented
        return func(*args, **(kwargs or {}))
