"""Which layers cannot be trained privately, and what takes their place."""

from dpshard.integrations.opacus.validators.module_validator import ModuleValidator

__all__ = ["ModuleValidator"]
