"""Saving and resuming: the state of an engine, and `dpshard.Checkpointer` for a whole training.

`engine_state.py` and `facts.py` do not import torch.distributed.checkpoint. A state holds the ledger of
`accounting/ledger.py` and the budget of `accounting/budget.py`. May import `backends` and below. Begin with
`checkpointer.py`.
"""

from dpshard.checkpoint.engine_state import pack, require_released, unpack
