"""One logical batch, from its first forward to its release.

`collector.py`: its state, tapes and clipped sums. `logical_batch.py`: what a script iterates over.
`refusals.py`: why a logical batch cannot continue, and how to restart it.
`internals.py`: the engine's interface for the optimizer hook, Checkpointer and audits.
`silence.py`: micro-batches that a loss switched off. `first_gradients.py`: parameters without a gradient.
`optimizer_hook.py`: privatizes gradients before every optimizer step. `pipeline.py`: a logical batch on one stage.
`batch_state.py`: the states. `noise_of_run.py`, `chain.py`: the noise of every step. `order_check.py`: who takes part.
May import `backends`, `clipping`, `sampling` and below. Only `LogicalBatch` is for users. Begin with `collector.py`.
"""
