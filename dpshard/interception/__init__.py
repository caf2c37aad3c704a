"""Redirect every torch function that uses a trainable parameter to its rule.

Begin with `forward.py`; docs/architecture.md lists all files. May import `clipping`, `rules` and below. Not for users.
"""

from dpshard.interception.determinism import AS_DRAWN, HIGH, LOW, Draws
from dpshard.interception.forward import Interception
from dpshard.interception.held_objects import GENERATORS, access_to, container
from dpshard.interception.isolation import IsolatedForward
from dpshard.interception.kinds import kind_of_object, kind_of_value
from dpshard.interception.model_state import HOOKS, is_own, parts_of, same, walk, walk_through
from dpshard.interception.packed import PackedRun, is_block_mask
from dpshard.interception.placed import is_placed
from dpshard.interception.replay import Replay
from dpshard.interception.rows import Copies, Doubt, Doubts, OwnLoopRows, PartIdentity, RowIdentity, Together
from dpshard.interception.run import Run, by_unit
