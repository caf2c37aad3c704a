"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end.

`config.py`: refused settings. `sharding.py`, `partitions.py`, `flat_shard.py`, `stage3.py`: parameters. `gradients.py`,
`reducer.py`: sums. `state.py`: checkpoints. `linear.py`: torch's F.linear. May import what `backends` may. Not for
users. Begin with the note in `backend.py`. Imports nothing: `config.py` and `linear.py` run without DeepSpeed.
"""
