"""Names of parameters without the prefixes of wrappers: the keys of noise, groups and states."""

from __future__ import annotations

import functools
import sys

from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPERS = ", ".join(_WRAPPERS)
"""Wrappers of torch.compile, checkpointing and sharding, for error messages."""


@functools.lru_cache(maxsize=2**16)  # the same names come again in every step
def canonical_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return True if torch.compile returned `module`."""
    # Importing torch._dynamo takes longer than importing torch; a wrapper exists only after that import.
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
