"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end.

`backend.py`: its roles, put together. `sharding.py`: who holds the parameters. `gradients.py`: how sums cross ranks and
where gradients are kept. `config.py`: settings that are refused. `partitions.py` and `flat_shard.py`: where stages 1
and 2 keep a parameter. `stage3.py`: how stage 3 unshards them. `reducer.py`: sums over ranks. `state.py`: checkpoints.
`linear.py`: F.linear, as torch has it.
May import what `backends` may. Not for users. Begin with the note in `backend.py`. This file imports nothing, because
`config.py` and `linear.py` serve processes that have no DeepSpeed.
"""
