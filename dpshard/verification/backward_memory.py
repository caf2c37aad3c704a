"""Verify that a backward pass keeps nothing of a sample for later samples.

Hooks and autograd.Functions may store statistics of gradients, which a later forward or backward reads. A forward may
also keep something only if gradients are on, which memory.py does not see. So a pass on samples A, or on others A',
precedes one on B. The second gradient is scaled, because a loss outside the model may scale it. Buffers must not differ
after A and A', nor outputs and gradients of B. Attributes that no forward reads may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dpshard.errors import UnsupportedParameterError
from dpshard.interception import Run
from dpshard.verification.count_sketch import Sketch
from dpshard.verification.gradients import sketched_gradients
from dpshard.verification.memory import differing
from dpshard.verification.objectives import Objective
from dpshard.verification.repeated_call import RepeatedCall, RunFailedError, compared
from dpshard.verification.tolerances import differ, tolerance_across_sizes

OTHER_SIZE = 2.0
"""Factor of the other gradient."""


class _After(NamedTuple):
    changes: Mapping[str, Any]
    """State after A."""
    outputs: Sequence[Tensor]
    gradients: Mapping[str, Sketch]


def verify_backward_memory(
    repeated: RepeatedCall, other: Run, objective: Objective, parameters: Mapping[str, Sequence[Tensor]]
) -> None:
    """Raise UnsupportedParameterError if a pass on `other` samples leaves something that a later sample meets."""
    passes = [(repeated.run, 1.0), (other, OTHER_SIZE)]
    found = []
    for run, size in passes:
        make = functools.partial(_after, repeated, run, size, objective, parameters)
        try:
            found.append(repeated.state.guarded(make))
        except RunFailedError:
            return  # the model fails on inputs that verification made up
    first, second = found
    buffers = {name for name, _ in repeated.replay.parameters.model.named_buffers()}
    written = [name for name in differing(first.changes, second.changes) if name in buffers]
    tensors = [x for some in parameters.values() for x in some]
    if not written and not _differ(first, second, tolerance_across_sizes(tensors, half=repeated.half), repeated.half):
        return
    where = f"{written[0]}: a" if written else f"{type(repeated.run.module).__name__} remembers earlier samples: a"
    raise UnsupportedParameterError(
        f"{where} backward pass, or a forward with gradients, keeps a function of its samples, without noise, and "
        f"later samples may meet it. A hook or an autograd.Function may store a statistic of gradients (to scale or "
        f"quantise). Keep nothing of samples between passes, or compute it after engine.privatize()."
    )


def _after(
    repeated: RepeatedCall, run: Run, size: float, objective: Objective, parameters: Mapping[str, Sequence[Tensor]]
) -> _After:
    one = [repeated.chosen[0]]
    value = size * objective(repeated.plain(one, run=run), one)
    with repeated.backward():
        sketched_gradients(value, parameters)
    changes = repeated.state.model.changes()
    output = repeated.plain(one, rewind=False)
    with repeated.backward():
        return _After(changes, compared(output), sketched_gradients(objective(output, one), parameters))


def _differ(first: _After, second: _After, tolerance: float, half: bool) -> bool:
    if len(first.outputs) != len(second.outputs):
        return True
    if any(differ(x, y, half=half) for x, y in zip(first.outputs, second.outputs, strict=True)):
        return True
    if first.gradients.keys() != second.gradients.keys():
        return True
    pairs = [(first.gradients[name], second.gradients[name]) for name in first.gradients]
    size = sum(float(x.norm.square()) for x, _ in pairs) ** 0.5
    apart = sum(_distance_sq(x.image, y.image) for x, y in pairs) ** 0.5
    return apart != 0 and not apart <= tolerance * size  # NaN differs


def _distance_sq(x: Tensor, y: Tensor) -> float:
    """Return the squared distance; NaN equals NaN."""
    equal = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).masked_fill(equal, 0).square().sum())
