"""One logical batch, from its first forward to its release. Begin with `collector.py`.

`logical_batch.py`: what a script iterates over. `refusals.py`: errors. `internals.py`: interface for the optimizer
hook, Checkpointer and audits. `silence.py`, `first_gradients.py`: missing gradients. `pipeline.py`: stages. `chain.py`:
noise. `order_check.py`: who takes part. May import `backends`, `clipping`, `sampling` and below.
"""
