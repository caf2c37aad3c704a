"""What makes private training work, as plain torch objects and plain numbers: schedules, optimizers, presets.

Nothing in here decides privacy. An engine is given the numbers, and what it releases is public: optimizers may do with
it what they like.
"""

from dpshard.recipes.adam_bc import AdamBC
from dpshard.recipes.pretraining import DP_BERT, PretrainingRecipe
from dpshard.recipes.scaled_adam import ScaledAdam, scale_parameters, unscale_parameters
from dpshard.recipes.schedules import stepped_batches, warmup_quadratic_decay

__all__ = [
    "DP_BERT",
    "AdamBC",
    "PretrainingRecipe",
    "ScaledAdam",
    "scale_parameters",
    "stepped_batches",
    "unscale_parameters",
    "warmup_quadratic_decay",
]
