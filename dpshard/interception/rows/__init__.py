"""Evidence that row i of every forward of a micro-batch is sample i. Not for users. Begin with `identity.py`."""

from dpshard.interception.rows.chunks import PartIdentity, Together
from dpshard.interception.rows.doubts import Doubt, Doubts
from dpshard.interception.rows.identity import RowIdentity
from dpshard.interception.rows.own_loop import OwnLoopRows
from dpshard.interception.rows.padding import Copies
