"""Saving and resuming: the sealed state of an engine, and `dpshard.Checkpointer` for a whole training.

`Checkpointer` lives in dpshard.checkpoint.checkpointer: the engine, which needs `pack` and `unpack`, does not wait for
torch.distributed.checkpoint.
"""

from dpshard.checkpoint.engine_state import pack, unpack

__all__ = ["pack", "unpack"]
