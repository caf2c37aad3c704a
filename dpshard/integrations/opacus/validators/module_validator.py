"""Opacus's ModuleValidator in terms of `dpshard.replace_unsupported`."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from torch import nn

from dpshard.errors import UnsupportedParameterError
from dpshard.replacements import replace_unsupported


class ModuleValidator:
    """Find layers that mix samples, and replace them in a copy."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedParameterError]:
        """Return an error per unsupported layer; if `strict`, raise the first."""
        tensors = chain(module.parameters(), module.buffers())
        # The copy shares the tensors.
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
    def fix(cls, module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """Return a copy of `module` with such layers replaced; make the optimizer from its parameters.

        `replace_bn_with_in`: BatchNorm becomes InstanceNorm, not for inputs [B, C].
        """
        fixed = copy.deepcopy(module)
        if replace_bn_with_in:
            for name, layer in list(fixed.named_modules()):
                kind = _INSTANCE_NORMS.get(type(layer))
                if kind is not None and name:
                    parent, _, attribute = name.rpartition(".")
                    setattr(fixed.get_submodule(parent), attribute, _instance_norm(kind, layer))
        replace_unsupported(fixed)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """Return a copy of `module` with unsupported layers replaced; see `fix`."""
        return cls.fix(module, replace_bn_with_in=replace_bn_with_in)


_INSTANCE_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


def _instance_norm(kind: type[nn.Module], norm: Any) -> nn.Module:
    new: Any = kind(norm.num_features, eps=norm.eps, affine=norm.affine, track_running_stats=False)
    new.weight, new.bias = norm.weight, norm.bias
    return new.train(norm.training)
