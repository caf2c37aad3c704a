"""Public names of the planner, which lives in `applications/planner/`: what a private step costs on many ranks."""

from dpshard.applications.planner import *  # noqa: F403
from dpshard.applications.planner import __all__ as __all__
