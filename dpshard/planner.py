"""Public names of `applications/planner/`: the cost of a private step on many ranks."""

from dpshard.applications.planner import *  # noqa: F403
from dpshard.applications.planner import __all__ as __all__
