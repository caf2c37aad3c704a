"""Counts the launches of a step on a GPU, and the operators for which the host waits."""

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import dpshard

LIBRARY = str(Path(dpshard.__file__).parent) + os.sep

FREE = {
    *("view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "mT", "slice", "select", "unsqueeze"),
    *("squeeze", "squeeze_", "as_strided", "detach", "alias", "split", "split_with_sizes", "unsafe_split", "unbind"),
    *("unfold", "diagonal", "narrow", "view_as", "view_as_real", "unflatten", "flatten", "movedim", "lift_fresh"),
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "is_same_size"),
    *("_local_scalar_dense", "is_pinned"),
}
"""Operators that launch nothing."""
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique_consecutive", "_unique2", "masked_select")
"""Operators that send numbers or sizes to the host."""


class Counts(TorchDispatchMode):
    """Counts launches and waits by operator and by place in dpshard."""

    def __init__(self):
        super().__init__()
        self.launches, self.waits = Counter(), Counter()

    def reset(self):
        self.launches.clear()
        self.waits.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        inputs = _tensors((args, kwargs))
        if name in READS and any(x.is_cuda for x in inputs):
            self.waits[f"{place()} {name}"] += 1
        if name in ("_local_scalar_dense", "equal"):
            if not any(isinstance(x, FakeTensor) for x in inputs):
                with _disable_current_modes():
                    return func(*args)
            return True if name == "equal" else _plain_zero(inputs[0].dtype)
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in (*inputs, *_tensors(result))}
        if name in ("_to_copy", "copy_") and len(devices) > 1:
            self.waits[f"{place()} {'sends' if (kwargs or {}).get('non_blocking') else 'copies'}"] += 1
        elif name not in FREE and func.namespace != "prim" and _launches(inputs + _tensors(result)):
            self.launches[f"{place()} {name}"] += 1
        return result

    @contextlib.contextmanager
    def on_lists(self):
        """Let tolist of fake tensors return zeros, and count it."""
        original = FakeTensor.tolist

        def tolist(x):
            if x.is_cuda:
                self.waits[f"{place()} tolist"] += 1
            return _zeros(tuple(x.shape), _plain_zero(x.dtype))

        FakeTensor.tolist = tolist
        try:
            yield
        finally:
            FakeTensor.tolist = original


def _launches(tensors):
    return any(x.is_cuda and x.numel() for x in tensors)


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _plain_zero(dtype):
    return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def _zeros(shape, zero):
    return [_zeros(shape[1:], zero) for _ in range(shape[0])] if shape else zero


def place():
    """Return the innermost frame of dpshard: file and function."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(LIBRARY):
            return f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "the script:"
