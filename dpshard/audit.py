"""Public names of `applications/audit/`: attacks on a training, and the bounds that they prove."""

from dpshard.applications.audit import *  # noqa: F403
from dpshard.applications.audit import __all__ as __all__
