"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end.

`backend.py`: composition of the roles. `sharding.py`: parameters. `gradients.py`: sums and gradients. `config.py`:
refused settings. `partitions.py`, `flat_shard.py`: the memory layout. `stage3.py`: unsharding of stage 3. `reducer.py`:
sums over ranks. `state.py`: checkpoints. `linear.py`: torch's F.linear. May import what `backends` may. Not for users.
Begin with the note in `backend.py`. This file imports nothing: `config.py` and `linear.py` run without DeepSpeed.
"""
