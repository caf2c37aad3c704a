"""Saving and resuming: the state of an engine, and `dpshard.Checkpointer` for a whole training.

`storage.py`, `folders.py`, `disk.py`: files. `journal.py`, `notes.py`: releases that a crash forgets.
`engine_state.py`, `facts.py`: the state of an engine, which imports only `pack` and `unpack`, not
torch.distributed.checkpoint. May import
`backends` and below. Begin with `checkpointer.py`.
"""

from dpshard.checkpoint.engine_state import pack, unpack

__all__ = ["pack", "unpack"]
