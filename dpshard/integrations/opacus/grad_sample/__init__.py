"""The private module under Opacus's name."""

from dpshard.integrations.opacus.grad_sample.grad_sample_module import GradSampleModule

__all__ = ["GradSampleModule"]
