"""The cost of a private step on many ranks, counted without a cluster."""

from dpshard.applications.planner.estimates import DEFAULT_CLIPPINGS, Estimate, Plan, make_plan
from dpshard.applications.planner.models import PRESETS, Transformer
from dpshard.applications.planner.simulation import Clipping, Setup

__all__ = ["DEFAULT_CLIPPINGS", "PRESETS", "Clipping", "Estimate", "Plan", "Setup", "Transformer", "make_plan"]
