"""Verify that a model keeps nothing of a sample for later samples.

A run of samples A, or of others A' of equal shape, precedes a run of B. A buffer that differs after A and A' holds
data, which the state dict would publish. An attribute may differ until B overwrites it. Outputs of B must be equal
after A, after A', and first. This comparison covers globals and closures, which cannot be restored. Counters may
change, because they depend only on shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpshard.errors import UnsupportedParameterError
from dpshard.interception import Run, same
from dpshard.verification.repeated_call import RepeatedCall
from dpshard.verification.samples import has_numbers, replaced, with_other_numbers
from dpshard.verification.tolerances import differ


def others_of(repeated: RepeatedCall) -> list[Run]:
    """Return runs in which the first chosen sample has other inputs; in the first run, those of an outlier."""
    run, first = repeated.run, repeated.chosen[0]
    rows = list(range(run.batch_size))
    other = replaced(run, [*rows[:first], repeated.chosen[-1], *rows[first + 1 :]])
    others = [with_other_numbers(run, first) if len(repeated.chosen) == 1 else other]
    return [replaced(others[0], rows, [first]), *others] if has_numbers(run) else others


@dataclass(frozen=True, slots=True)
class Counters:
    """State that every forward changes in the same way, whatever the samples."""

    paths: frozenset[str] = frozenset()
    decide: bool = False
    """True if an output depends on the number of forwards before it."""


def verify_memory(repeated: RepeatedCall, others: Sequence[Run], *, thorough: bool) -> Counters:
    """Raise UnsupportedParameterError if the model keeps something of a sample; return its counters."""
    run, one = repeated.run, [repeated.chosen[0]]
    alone = repeated.values(one)
    state = repeated.state
    kept, after, outputs = [], [], []
    for before in (run, *others):
        if len(kept) > 1 and not thorough:
            break
        if repeated.values_if_it_runs(one, run=before) is None:
            continue
        kept.append(state.model.changes())
        outputs.append(repeated.values(one, rewind=False))
        after.append(state.model.changes())
    buffers = {name for name, _ in repeated.replay.parameters.model.named_buffers()}
    for other in range(1, len(kept)):
        for name in differing(kept[0], kept[other]):
            if name in buffers:
                raise UnsupportedParameterError(
                    f"{name}: forward writes a function of the samples into this buffer, without noise, and later "
                    f"samples may read it. Put the module in eval mode, or drop its running statistics (BatchNorm: use "
                    f"GroupNorm; InstanceNorm: use track_running_stats=False)."
                )
        for name in differing(after[0], after[other]):
            raise UnsupportedParameterError(
                f"{name}: forward keeps a function of earlier samples here, without noise, and later samples may "
                f"read it. Keep nothing of samples between forwards: pass states as inputs and outputs, and count "
                f"steps, not data."
            )
        _verify_outputs(repeated, outputs[0], outputs[other], "an attribute, a global or a closure")
    _verify_outputs(repeated, alone, repeated.values(one), "a global or a closure, which cannot be restored")
    draws = any(path in kept[0] for path in state.model.generators())
    return Counters(frozenset(kept[0]), bool(kept[0]) and not draws and _any_differ(repeated, alone, outputs[0]))


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the paths at which two changed states differ."""
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if name not in first or name not in second or not _same(first[name], second[name])
    ]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple) and x and isinstance(x[0], torch.Tensor):
        x, y = x[0], y[0]
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.is_meta or same(x.detach(), y.detach())
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return False
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return same(x, y)
    return repr(x) == repr(y)


def _any_differ(repeated: RepeatedCall, first: Any, second: Any) -> bool:
    return any(differ(x, y, half=repeated.half) for x, y in zip(first, second, strict=True))


def _verify_outputs(repeated: RepeatedCall, first: Any, second: Any, where: str) -> None:
    if _any_differ(repeated, first, second):
        raise UnsupportedParameterError(
            f"{type(repeated.run.module).__name__} remembers earlier samples: the same sample has a different "
            f"output after other samples. The memory may be in {where} (a detached hidden state, a queue of "
            f"features, a running statistic). Keep nothing of samples between forwards. Or forward draws from a "
            f"generator that dpshard cannot restore (np.random.default_rng(), secrets): draw by torch."
        )
