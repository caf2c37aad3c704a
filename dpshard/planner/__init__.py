"""Scale without a cluster: what a private training step costs on many ranks, before anybody rents them."""

from dpshard.planner.estimates import DEFAULT_CLIPPINGS, Estimate, Plan, make_plan
from dpshard.planner.models import PRESETS, Transformer
from dpshard.planner.simulation import Clipping, Setup

__all__ = ["DEFAULT_CLIPPINGS", "PRESETS", "Clipping", "Estimate", "Plan", "Setup", "Transformer", "make_plan"]
