"""Opacus's errors of layers: dpshard has one class for them."""

from dpshard.errors import UnsupportedParameterError

UnsupportedError = UnsupportedParameterError
ShouldReplaceModuleError = UnsupportedParameterError
UnsupportedModuleError = UnsupportedParameterError
UnsupportableModuleError = UnsupportedParameterError
IllegalModuleConfigurationError = UnsupportedParameterError

__all__ = [
    "IllegalModuleConfigurationError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
]
