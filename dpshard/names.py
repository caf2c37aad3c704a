"""Names of parameters that do not change with what wraps a model: noise, groups and states are keyed by them."""

from __future__ import annotations

import sys

from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPERS = ", ".join(_WRAPPERS)
"""What torch.compile, checkpointing and sharding wrappers put into names, for messages."""


def canonical_name(name: str) -> str:
    """The name of a parameter or module without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return True if torch.compile returned `module`."""
    # To import the compiler takes longer than to import torch. It is there if it has made a wrapper.
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
