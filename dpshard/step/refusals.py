"""Error messages and refusals of a logical batch."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn

from dpshard.backends import updated_early
from dpshard.config import SamplingName
from dpshard.errors import EngineInUseError, LogicalBatchError
from dpshard.step.logical_batch import BatchState, LogicalBatch, MicroBatch

DETACHED = (
    "The engine was detached, so the model is an ordinary one. To resume the run, make a new engine and load the "
    "state_dict() of this one."
)

PACKED_UNVERIFIED = (
    "Packed rows need verify=True, because only a comparison of units shows that attention stays within them, and "
    "rows_per_unit=1."
)
BETWEEN_BATCHES = (
    "The model was called for training between two micro-batches of engine.batches, or between two "
    "logical batches. Train on each micro-batch before the next one is fetched: no list(logical_batch), "
    "no prefetcher, no threads (num_workers= reads ahead). Evaluate in model.eval() or under "
    "torch.no_grad(). To send the gradient of another model through it, as a GAN does, use "
    "model.eval().requires_grad_(False), and undo both afterwards."
)
OTHER_ENGINE = (
    "The model was called within a micro-batch of another engine. This engine does not know which rows are padding, so "
    "a sample would count once for each copy. For models that train on the same batches, make one engine for one "
    "module whose forward calls them all; clipping_style=[[...], [...]] gives each a threshold of its own. Otherwise "
    "iterate over batches of this engine, after the micro-batches of the other."
)
LOADED_WITHIN = (
    "load_state_dict() in the middle of a logical batch: load before the loop over engine.batches(...), or after "
    "optimizer.step(), and leave that loop."
)
NOT_PRIVATE = (
    "There are no private gradients yet: call engine.privatize() after the micro-batches of a logical batch, and look "
    "at them before the optimizer's step."
)
HANDED_OUT = (
    "torch.autograd.grad(loss, parameters) would hand out clipped sums without noise, and no step would be counted. "
    "Call loss.backward(), then engine.privatize(), and read the gradients from .grad."
)
OWN_LOOP = (
    "This loop feeds its own batches. Epsilon holds only if Poisson sampling draws each batch, with "
    "probability batch_size / sample_size per sample (a shuffled DataLoader does not), and if each sample "
    "is in at most one forward per step. engine.batches(dataset, micro_batch_size) ensures both. "
    "If this forward only evaluates, call model.eval(), or use torch.no_grad()."
)
OWN_LOOP_IN_TERMS = (
    "Ranks hold parts of one sample (model_parallel_parts has a 'sum'), and this loop feeds its own batches, so "
    "nothing shows that row i is the same sample on all of them. Train on engine.batches(dataset, micro_batch_size), "
    "which hands every rank of a model the same samples, and take this rank's part of the sequence in the loop."
)
PACKED_IN_PARTS = (
    "Packed rows have no rule for a model with parts on several ranks, which may split the sequence: positions would "
    "be taken for those of other units. Train with one unit a row, or without tensor and context parallelism."
)
PACKED_TWICE = (
    "engine.packed(...) is for loops that feed their own batches; engine.batches(..., packing=) knows the units of its "
    "micro-batches. Leave engine.packed out."
)

_AGAIN = (
    "Nothing was released. Leave the loop and call engine.batches(...) again: it draws the same logical batch, at no "
    "cost. If memory ran out, take a smaller micro_batch_size."
)

AFTER_FAILED_BACKWARD = (
    f"Backward failed half-way on this micro-batch, so some of its samples may be in the sum already. The micro-batch "
    f"can neither be repeated nor left out. {_AGAIN}"
)

BACKWARD_BEFORE_CLOSURE = (
    "backward() was called before optimizer.step(closure), and the closure calls it again, so the samples would count "
    "twice. Nothing was released, and the sums were dropped. Call backward() only in the closure, or call step() "
    "without a closure. For two gradients a step (SAM), call optimizer.step() after each backward(); each call is a "
    "release."
)
PACKED_IN_ORDER = (
    "sampling='fixed-order' checks which samples take part, but a packed row holds several, so they cannot be told "
    "apart. Pass documents to engine.batches(dataset, micro_batch_size, packing=...), which identifies them by their "
    "index."
)

CAPTURED = (
    "A CUDA graph captures this forward. A replayed graph runs no Python, so dpshard could not count its samples or "
    "add noise. Move forward, backward and step out of torch.cuda.graph, or compile the blocks of the model."
)


def refuse_own_loop(sampling: SamplingName) -> None:
    """Raise LogicalBatchError if own batches cannot be accounted for."""
    if sampling not in ("poisson", "fixed-order"):
        raise LogicalBatchError(
            f"sampling={sampling!r} draws samples by a secret of the run, so the engine draws the batches. Iterate "
            f"over engine.batches(dataset, micro_batch_size), not over your own batches."
        )


def superseded(*, detached: bool) -> str:
    """Say why a loop cannot continue after another."""
    if detached:
        return DETACHED
    return (
        "This loop began before load_state_dict(), or before another engine.batches(...), so its batches are not the "
        "next ones of the run. Call engine.batches(...) again."
    )


def unreleased(batch: LogicalBatch, state: BatchState, written: Callable[[], str | None]) -> str:
    """Say why the next logical batch cannot begin. `written` names a parameter that was written since its forward."""
    if state is BatchState.COLLECTING and (name := written()):
        return updated_early(name)
    return (
        f"The logical batch of step {batch.step} was not released. Call optimizer.step() after its micro-batches, even "
        f"if it is empty, and then optimizer.zero_grad(). An update by hand needs engine.privatize() first. If you did "
        f"either, the optimizer holds none of the engine's parameters: make it from model.parameters(), after "
        f"fully_shard, which replaces them."
    )


def half_finished(batch: LogicalBatch) -> str:
    """Say why a step within the loop is refused."""
    return (
        f"optimizer.step() was called after {batch.progress()} of this logical batch. Call it once per logical batch, "
        f"after the loop over its micro-batches."
    )


def failed_release(batch: LogicalBatch, step: int) -> str:
    """Say why a failed release is not repeated."""
    return (
        f"The release of step {batch.step} failed after it was counted, and its batch must not get the noise of step "
        f"{step}. Leave the loop and call engine.batches(...) again: it resumes at step {step}."
    )


def not_whole(batch: LogicalBatch | None, micro: MicroBatch | None, why: str) -> str:
    """Say why a logical batch is incomplete."""
    reason = (
        "If the data decide which micro-batches are left out, one sample decides for all samples of its micro-batch. "
        "Do not skip a micro-batch with a loss of NaN or inf: samples without a finite gradient contribute 0. If you "
        "do not train on an output of the model, call the model under torch.no_grad()."
    )
    if batch is None:
        where = f"A forward in training mode since the last release is incomplete: {why}"
        again = (
            "Nothing was released, and the sums were dropped. Feed all rows of this logical batch again, or iterate "
            "over engine.batches(...), which repeats a logical batch."
        )
    else:
        where = (
            f"A micro-batch of step {batch.step} is incomplete {why}"
            if micro is None
            else f"Micro-batch {micro.plan.position + 1} of step {batch.step} is incomplete: {why}"
        )
        again = _AGAIN
    padding = ""
    if micro is not None and not micro.plan.samples:
        padding = " It is padding on this rank, but other ranks wait for its forward and backward."
    return f"{where}.{padding} {reason} {again}"


def refuse_fork(process: int) -> None:
    """Raise EngineInUseError in a fork of `process`: both would draw the same batches, but count apart."""
    if os.getpid() != process:
        raise EngineInUseError(
            f"This engine was made in process {process}, and process {os.getpid()} is a fork of it. Both would release "
            f"the same steps under one secret, and each ledger would miss the other's. Make the engine in the process "
            f"that trains, after the fork; each has its own secret and budget."
        )


def part_called(part: nn.Module) -> str:
    """Say why an own loop cannot call a part of the model."""
    return (
        f"{type(part).__name__}, a part of the model, was called directly: its gradients would be clipped separately "
        f"from the rest. Call the whole model, or iterate over engine.batches(...), which shows the calls of the same "
        f"samples."
    )
