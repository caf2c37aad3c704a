"""The interface of Opacus on the engine of dpshard: change the import, keep the script (docs/coming-from-opacus.md).

Modules have the names that they have there, `utils.batch_memory_manager` for instance. What Opacus does and dpshard
cannot account for is refused with a reason.
"""

from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.privacy_engine import PrivacyEngine

__all__ = ["GradSampleModule", "PrivacyEngine"]
