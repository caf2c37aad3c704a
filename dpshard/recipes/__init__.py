"""Schedules, optimizers and presets for private training; nothing here affects privacy.

May import `config` and `errors`. Begin with `schedules.py`.
"""

from dpshard.recipes.adam_bc import AdamBC
from dpshard.recipes.averaging import WeightAverage
from dpshard.recipes.pretraining import DP_BERT, VAULT_GEMMA, PretrainingRecipe, SequenceRecipe
from dpshard.recipes.scaled_adam import ScaledAdam, scale_parameters, unscale_parameters
from dpshard.recipes.schedules import stepped_batches, warmup_quadratic_decay

__all__ = [
    "DP_BERT",
    "VAULT_GEMMA",
    "AdamBC",
    "PretrainingRecipe",
    "ScaledAdam",
    "SequenceRecipe",
    "WeightAverage",
    "scale_parameters",
    "stepped_batches",
    "unscale_parameters",
    "warmup_quadratic_decay",
]
