"""Error messages for a logical batch that cannot continue: where, why, and how to restart it."""

from __future__ import annotations

from dpshard.step.logical_batch import LogicalBatch, MicroBatch

DETACHED = (
    "The engine was detached, and the model is an ordinary one: make a new engine, and load the state_dict() of this "
    "one to go on with its run."
)

_AGAIN = (
    "Nothing was released: leave the loop and call engine.batches(...) again. It draws the same logical batch, at no "
    "cost; after running out of memory, with a smaller micro_batch_size."
)

AFTER_FAILED_BACKWARD = (
    f"Backward failed half-way on this micro-batch, and part of its samples may have been counted: it can neither be "
    f"repeated nor left out. {_AGAIN}"
)

BACKWARD_BEFORE_CLOSURE = (
    "backward() was called before optimizer.step(closure), and the closure calls it again: the samples would count "
    "twice. Nothing was released, and the sums were dropped. Call backward() in the closure only, or step() without "
    "it. For two gradients a step (SAM), step twice: optimizer.step() after each backward(), each of which counts."
)
CAPTURED = (
    "A CUDA graph captures this forward. A replayed graph runs no Python: samples would be neither counted nor given "
    "noise. Leave forward, backward and step out of torch.cuda.graph, or compile the blocks of the model."
)


def superseded(*, detached: bool) -> str:
    """Say why a loop over logical batches cannot continue after another one began."""
    return (
        DETACHED
        if detached
        else (
            "These batches were begun before load_state_dict(), or before another engine.batches(...): they are not "
            "the next ones of the run. Call engine.batches(...) again."
        )
    )


def unreleased(batch: LogicalBatch) -> str:
    """Say why the next logical batch cannot begin."""
    return (
        f"The logical batch of step {batch.step} was not released: call optimizer.step() after its micro-batches (also "
        f"if it is empty), then optimizer.zero_grad(). If it was called, the optimizer holds none of the engine's "
        f"parameters: make it of model.parameters(), after fully_shard, which replaces them."
    )


def half_finished(batch: LogicalBatch) -> str:
    """Say why a step within the loop over micro-batches is refused."""
    return (
        f"optimizer.step() came after {batch.progress()} of this logical batch. Step once per logical batch, after the "
        f"loop over its micro-batches."
    )


def failed_release(batch: LogicalBatch, step: int) -> str:
    """Say why a logical batch cannot be released again after a failed release."""
    return (
        f"The release of step {batch.step} failed after it was counted, and its batch must not have the noise of step "
        f"{step}. Leave the loop: engine.batches(...) goes on with step {step}."
    )


def not_whole(batch: LogicalBatch | None, micro: MicroBatch | None, why: str) -> str:
    """Say why a logical batch with an incomplete backward cannot be released."""
    reason = (
        "Samples that are left out because of the data let one sample decide about all of its micro-batch. Leave no "
        "micro-batch out for a loss that is NaN or inf: samples without a finite gradient contribute 0. Call the model "
        "under torch.no_grad() if you do not train on its output."
    )
    if batch is None:
        where = f"A forward in training mode since the last release does not count whole: {why}"
        again = (
            "Nothing was released, and the sums were dropped: feed all rows of this logical batch again, or iterate "
            "over engine.batches(...), which repeats a logical batch."
        )
    else:
        where = (
            f"A micro-batch of step {batch.step} does not count whole {why}"
            if micro is None
            else f"Micro-batch {micro.plan.position + 1} of step {batch.step} does not count whole: {why}"
        )
        again = _AGAIN
    padding = ""
    if micro is not None and not micro.plan.samples:
        padding = " It is padding on this rank, but other ranks wait for its forward and backward."
    return f"{where}.{padding} {reason} {again}"
