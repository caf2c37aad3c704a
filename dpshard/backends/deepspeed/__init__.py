"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end. Begin with the note in `backend.py`.

Imports nothing: `config.py` (refused settings) and `linear.py` run without DeepSpeed. `sharding.py`, `partitions.py`,
`flat_shard.py`, `stage3.py`: parameters. `gradients.py`, `reducer.py`: sums. `state.py`: checkpoints.
"""
