"""One logical batch, from its first forward to its release.

`collector.py`: its state, tapes and clipped sums. `logical_batch.py`: what a script iterates over.
`clipping/tape.py` refuses a second backward of a micro-batch.
`refusals.py`: why a logical batch cannot go on, and how it is begun anew.
`internals.py`: what the optimizer hook, Checkpointer and audits ask an engine.
`silence.py`: micro-batches that a loss has switched off. `first_gradients.py`: parameters that get none.
`optimizer_hook.py`: the hook that privatizes gradients before every optimizer step.
May import `backends`, `clipping`, `sampling` and below. Only `LogicalBatch` is for users. Begin with `collector.py`.
"""
