"""Functions of torch.nn.functional whose own Python code is the composition."""

from __future__ import annotations

import types
from typing import Any

import torch.nn.functional as F

from dpshard.rules.registry import composite


def _look_into(function: Any) -> None:
    """Register a function without its check for modes, which would pass the whole call to the mode again."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = dict(vars(F), **dict.fromkeys(checks, lambda *_tensors: False))
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    composite(function)(copy)


_look_into(F.multi_head_attention_forward)
_look_into(F.gumbel_softmax)
