"""Records with their own memory, because later code may overwrite their inputs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor


class OwnMemory:
    """Copies records, and a tensor that several share only once."""

    def __init__(self) -> None:
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}  # holds originals: no other gets their address

    def of(self, record: Any) -> Any:
        """Return a record with copies of its tensors."""
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        return replace(record, **{key: self.copy(x) for key, x in values.items() if isinstance(x, Tensor)})

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy; an expanded tensor stays expanded."""
        key = x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
        if key not in self._copies:
            small = x.detach()
            for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
                small = small.narrow(dim, 0, 1) if stride == 0 and size > 1 else small
            self._copies[key] = x, small.clone(memory_format=torch.contiguous_format).expand(x.shape)
        return self._copies[key][1]
