"""Find and replace layers that cannot be trained privately."""

from dpshard.integrations.opacus.validators.module_validator import ModuleValidator

__all__ = ["ModuleValidator"]
