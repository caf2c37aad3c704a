"""The interface of Opacus on the engine of dpshard: change the import, keep the script (docs/coming-from-opacus.md).

Modules have Opacus's names, such as `utils.batch_memory_manager`. Features of Opacus that dpshard cannot account for
are refused with a reason.
"""

from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.privacy_engine import PrivacyEngine

__all__ = ["GradSampleModule", "PrivacyEngine"]
