"""One logical batch, from its first forward to its release. Begin with `collector.py`.

`collector.py`: tapes and clipped sums. `batch_state.py`: states. `logical_batch.py`: what a script iterates over.
`refusals.py`: errors. `internals.py`: interface for the optimizer hook, Checkpointer and audits. `optimizer_hook.py`:
privatizes. `silence.py`, `first_gradients.py`: missing gradients. `pipeline.py`: stages. `noise_of_run.py`, `chain.py`:
noise of every step. `order_check.py`: who takes part. May import `backends`, `clipping`, `sampling` and below.
"""
