"""torchtitan with private training: `private(config)` makes a private run of a config of its registries.

Begin with `trainer.py`.
"""

from dpshard.integrations.torchtitan.documents import Documents
from dpshard.integrations.torchtitan.trainer import Privacy, PrivateTrainer, private

__all__ = ["Documents", "Privacy", "PrivateTrainer", "private"]
