"""Opacus's errors for layers; here they are one class."""

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
