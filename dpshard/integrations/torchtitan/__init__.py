"""torchtitan with private training: `private(config)` makes a private run of a config of its registries.

Begin with `trainer.py`. `documents.py` has what is drawn, `model.py` what is done to a model before it is parallelized.
`context.py` is for parts of documents, `stages.py` for pipelines. `refusals.py` has what is refused, `checkpoints.py`
the engine in torchtitan's checkpoints.
"""

from dpshard.integrations.torchtitan.documents import Documents
from dpshard.integrations.torchtitan.trainer import Privacy, PrivateTrainer, private

__all__ = ["Documents", "Privacy", "PrivateTrainer", "private"]
