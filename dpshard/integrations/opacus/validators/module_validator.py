"""Opacus's ModuleValidator in terms of `dpshard.replace_unsupported`."""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn

from dpshard.errors import UnsupportedParameterError
from dpshard.replacements import replace_unsupported


class ModuleValidator:
    """Finds layers that mix samples, and replaces them in a copy of the model.

    It checks layers, not functions: other parts without an exact per-sample gradient raise when the model runs.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedParameterError]:
        """Return an error for every layer that must be replaced; `strict` raises the first."""
        tensors = chain(module.parameters(), module.buffers())
        # A copy of only the structure: it shares the tensors.
        skeleton = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
        try:
            errors = [
                UnsupportedParameterError(f"{name}: {change}; ModuleValidator.fix(model) does that.")
                for name, change in replace_unsupported(skeleton).items()
            ]
        except UnsupportedParameterError as error:
            errors = [error]
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return True if `validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module) -> nn.Module:
        """Return a copy of `module` with such layers replaced; make the optimizer from its parameters."""
        fixed = copy.deepcopy(module)
        replace_unsupported(fixed)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        """See `fix`."""
        return cls.fix(module)
