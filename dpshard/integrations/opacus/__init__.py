"""Opacus's interface on dpshard's engine (docs/coming-from-opacus.md)."""

from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.privacy_engine import PrivacyEngine

__all__ = ["GradSampleModule", "PrivacyEngine"]
