"""Opacus's interface on dpshard's engine: change the import, keep the script (docs/coming-from-opacus.md)."""

from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.privacy_engine import PrivacyEngine

__all__ = ["GradSampleModule", "PrivacyEngine"]
