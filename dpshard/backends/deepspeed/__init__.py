"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end.

`backend.py`: the back-end. `config.py`: settings that are refused. `partitions.py` and `flat_shard.py`: where stages 1
and 2 keep a parameter. `stage3.py`: how stage 3 gathers them. `reducer.py`: sums over ranks. `state.py`: checkpoints.
May import what `backends` may. Not for users. Begin with the note in `backend.py`. This file imports nothing, because
`config.py` serves processes that have no DeepSpeed.
"""
