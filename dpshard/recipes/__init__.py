"""What makes private training work, as plain torch objects and plain numbers: schedules, optimizers, presets.

Nothing in here decides privacy. An engine is given the numbers, and what it releases is public: optimizers may do with
it what they like.
"""

from dpshard.recipes.adam_bc import AdamBC
from dpshard.recipes.pretraining import DP_BERT, PretrainingRecipe
from dpshard.recipes.schedules import stepped_batches, warmup_quadratic_decay

__all__ = ["DP_BERT", "AdamBC", "PretrainingRecipe", "stepped_batches", "warmup_quadratic_decay"]
