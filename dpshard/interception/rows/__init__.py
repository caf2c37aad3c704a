"""Evidence that row i of every forward of a micro-batch is sample i.

`identity.py` watches a micro-batch; `doubts.py` keeps the findings until the release. Each other file holds one kind of
evidence: repeated rows, copies of the last sample, computations between two parts of a model. `parts.py` joins the
parts that a pipeline's schedule makes of a micro-batch. `own_loop.py` tells apart the samples of a loop of the user's
own. May import `run.py` of `interception`, and `sampling`. Not for users. Begin with `identity.py`.
"""

from dpshard.interception.rows.copies import Copies
from dpshard.interception.rows.doubts import Doubt, Doubts
from dpshard.interception.rows.identity import RowIdentity
from dpshard.interception.rows.own_loop import OwnLoopRows
from dpshard.interception.rows.parts import PartIdentity, Together

__all__ = ["Copies", "Doubt", "Doubts", "OwnLoopRows", "PartIdentity", "RowIdentity", "Together"]
