"""Who a row is: evidence that row i of every forward of a micro-batch is sample i.

`identity.py` watches a micro-batch, and each other file holds one kind of evidence: rows that come again, copies of the
last sample, what a loop computes between two parts of a model. `doubts.py` keeps what was seen until the release.
May import `run.py` of `interception`, and `sampling`. Not for users. Begin with `identity.py`.
"""

from dpshard.interception.rows.copies import Copies
from dpshard.interception.rows.doubts import Doubt, Doubts
from dpshard.interception.rows.identity import RowIdentity

__all__ = ["Copies", "Doubt", "Doubts", "RowIdentity"]
