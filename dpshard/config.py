"""Settings that are parsed once, and their checks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, Literal, get_args, overload

from dpshard.errors import ConfigurationError

BatchSize = int | Sequence[tuple[int, int]] | Callable[[int], int]
"""Fixed, phases `[(batch_size, steps), ...]`, or a callable of the step from 0."""

ClippingStyle = Literal["all-layer", "layer-wise", "block-wise", "param-wise"]
LossReduction = Literal["mean", "sum"]
AccountantName = Literal["pld", "rdp", "gdp"]
OffloadRecords = bool | float | Literal["auto"]
"""True: all records; False: none; "auto": what does not fit; GiB that stay on the device."""
NoiseName = Literal["gaussian", "discrete-gaussian"]
SamplingName = Literal["poisson", "cyclic-poisson", "fixed-order", "balls-in-bins"]
"""See [Note: Ways to sample] in accounting/sampling_schemes.py."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The public expected batch size of every step; the only divisor of the update."""

    sizes: tuple[int, ...]
    """Expected logical batch sizes over all ranks, one entry a step."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return len(self.sizes)

    @overload
    def __getitem__(self, step: int) -> int: ...
    @overload
    def __getitem__(self, step: slice) -> tuple[int, ...]: ...
    def __getitem__(self, step: int | slice) -> int | tuple[int, ...]:
        """Return the size at `step`; past the end, the last one."""
        if isinstance(step, slice):
            return self.sizes[step]
        return self.sizes[min(step, len(self.sizes) - 1)]

    def __iter__(self) -> Iterator[int]:
        """Yield the size of each step."""
        return iter(self.sizes)

    def phases(self) -> list[tuple[int, int]]:
        """Return `[(batch_size, number of steps), ...]` in order."""
        return [(size, sum(1 for _ in run)) for size, run in groupby(self.sizes)]

    @classmethod
    def parse(
        cls,
        batch_size: BatchSize,
        *,
        sample_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        sampling: SamplingName = "poisson",
    ) -> BatchSchedule:
        """Return the schedule for the user's settings; `epochs` means round(epochs * sample_size / batch_size) steps.

        With "balls-in-bins" an epoch has steps_of_epoch(...) steps, with "fixed-order" sample_size // batch_size: no
        sample is charged twice an epoch. If batch sizes vary, `epochs` sets the expected number of drawn samples.
        Raises ConfigurationError for empty runs, and batches larger than the data set.
        """
        if isinstance(sample_size, bool) or not isinstance(sample_size, int):
            raise ConfigurationError(f"sample_size must be an int, the number of samples; got {sample_size!r}.")
        if sample_size < 1:
            raise ConfigurationError(f"The data set is empty: sample_size={sample_size}; it must be at least 1.")
        if isinstance(batch_size, (str, float)) or not (
            isinstance(batch_size, (int, Sequence)) or callable(batch_size)
        ):
            raise ConfigurationError(
                f"batch_size={batch_size!r}: give an int, phases [(batch_size, steps), ...], or a callable of the step."
            )
        if not isinstance(batch_size, int) and not callable(batch_size):
            steps = _steps_of_phases(batch_size, epochs, steps)
            sizes = tuple(size for size, count in batch_size for _ in range(count))
        else:
            if (epochs is None) == (steps is None):
                raise ConfigurationError(
                    "Give exactly one of epochs= and steps=: accounting needs the length of the run."
                )
            if isinstance(batch_size, int) and epochs is not None:
                require_positive("batch_size", batch_size)
                require_positive("epochs", epochs)
                per_epoch = sample_size / batch_size
                if sampling == "balls-in-bins":
                    per_epoch = steps_of_epoch(sample_size, batch_size)
                elif sampling == "fixed-order":
                    per_epoch = sample_size // batch_size
                epochs, steps = None, max(1, round(epochs * per_epoch))
            size_of = batch_size if callable(batch_size) else lambda _step: batch_size
            sizes = _sizes(size_of, sample_size, epochs, steps)
        for step, size in enumerate(sizes):
            where = "" if isinstance(batch_size, int) else f" at step {step}"
            if not is_count(size):
                raise ConfigurationError(f"batch_size{where} is {size!r}; it must be a positive int.")
            if size > sample_size:
                raise ConfigurationError(
                    f"batch_size {size}{where} is larger than the data set (sample_size={sample_size}); "
                    f"choose a batch_size of at most {sample_size}."
                )
        return cls(sizes)


def steps_of_epoch(sample_size: int, batch_size: int) -> int:
    """Return the steps of an epoch of "balls-in-bins"."""
    return max(1, round(sample_size / batch_size))


def _steps_of_phases(phases: Sequence[tuple[int, int]], epochs: float | None, steps: int | None) -> int:
    if epochs is not None:
        raise ConfigurationError("A list of phases already fixes the number of steps: leave epochs= out.")
    for phase in phases:
        if not (isinstance(phase, Sequence) and len(phase) == 2 and all(isinstance(n, int) for n in phase)):
            raise ConfigurationError(f"A phase is (batch_size, steps), two ints; got {phase!r}.")
        if phase[1] < 0:
            raise ConfigurationError(f"The phase {phase!r} has {phase[1]} steps; it cannot have fewer than 0.")
    total = sum(count for _, count in phases)
    if total < 1:
        raise ConfigurationError("The phases of batch_size have no step; give at least one (batch_size, steps).")
    if steps is not None and steps != total:
        raise ConfigurationError(f"steps={steps}, but the phases of batch_size have {total} steps; leave steps= out.")
    return total


def _sizes(size_of: Callable[[int], int], sample_size: int, epochs: float | None, steps: int | None) -> tuple[int, ...]:
    if steps is not None:
        if not is_count(steps):
            raise ConfigurationError(f"steps={steps!r}: it must be an int, and a run has at least one step.")
        return tuple(size_of(step) for step in range(steps))
    assert epochs is not None
    require_positive("epochs", epochs)
    wanted, drawn = epochs * sample_size, 0.0
    sizes: list[int] = []
    # Round half up.
    while not sizes or drawn + size_of(len(sizes)) / 2 <= wanted:
        sizes.append(size_of(len(sizes)))
        require_positive(f"batch_size at step {len(sizes) - 1}", sizes[-1])
        drawn += sizes[-1]
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Computation of the clipped sum: time and memory, never the result."""

    norm: NormMethod
    backward_passes: int
    """1 keeps all records until the norms are known; 2 repeats backward."""
    keep_per_sample: bool
    """True to reuse a norm's per-sample gradient in the clipped sum."""
    records_on_device: float | Literal["auto"] | None = None
    """GiB of records that may wait on the device, "auto" for what fits; None: all."""


class NormMethod(Enum):
    """Ways to compute a per-sample gradient norm."""

    INSTANTIATE = "instantiate"
    GHOST = "ghost"
    CHEAPEST = "cheapest"


CLIPPING_MODES: dict[str, Execution] = {
    "per-example": Execution(norm=NormMethod.INSTANTIATE, backward_passes=1, keep_per_sample=True),
    "fast-gradient": Execution(norm=NormMethod.INSTANTIATE, backward_passes=2, keep_per_sample=False),
    "ghost": Execution(norm=NormMethod.GHOST, backward_passes=2, keep_per_sample=False),
    "mixed-ghost": Execution(norm=NormMethod.CHEAPEST, backward_passes=2, keep_per_sample=False),
    "bk": Execution(norm=NormMethod.GHOST, backward_passes=1, keep_per_sample=False),
    "bk-mixed-ghost": Execution(norm=NormMethod.CHEAPEST, backward_passes=1, keep_per_sample=False),
    "bk-mixed-opt": Execution(norm=NormMethod.CHEAPEST, backward_passes=1, keep_per_sample=True),
    "auto": Execution(norm=NormMethod.CHEAPEST, backward_passes=1, keep_per_sample=True),
}
"""Lee & Kifer 2020, arXiv:2009.03106: "fast-gradient". Li et al. 2022, arXiv:2110.05679: "ghost". Bu et al. 2022,
arXiv:2205.10683: "mixed-ghost". Bu et al. 2023, arXiv:2210.00038: "bk...".
"""


def parse_clipping_mode(mode: str, *, offload_records: OffloadRecords = False) -> Execution:
    """Return the execution named `mode`; ConfigurationError without records to offload."""
    if not isinstance(mode, str) or mode not in CLIPPING_MODES:
        raise ConfigurationError(f"clipping_mode={mode!r} is unknown; choose one of {sorted(CLIPPING_MODES)}.")
    execution = CLIPPING_MODES[mode]
    is_size = is_number(offload_records) and math.isfinite(offload_records) and offload_records >= 0  # type: ignore[operator]
    if not (is_size or isinstance(offload_records, bool) or offload_records == "auto"):
        raise ConfigurationError(
            f'offload_records={offload_records!r}: choose True (all records), False (none), "auto" (what does not fit '
            f"the GPU), or the GiB of records that stay on the GPU."
        )
    if offload_records is False:
        return execution
    if execution.backward_passes == 2:
        raise ConfigurationError(
            f"offload_records={offload_records!r}: clipping_mode={mode!r} takes two backward passes and keeps no "
            f"records. Choose a mode of one pass (auto, bk, bk-mixed-ghost, bk-mixed-opt, per-example), or leave "
            f"offload_records out."
        )
    return replace(execution, records_on_device=0.0 if offload_records is True else offload_records)


def is_number(value: object) -> bool:
    """Return True for an int or a float, False for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return True for a positive int, False for a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ConfigurationError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} is unknown; choose one of {list(choices)}.")


def require_positive(name: str, value: float) -> None:
    """Raise ConfigurationError unless `value` is finite and above zero."""
    if not (is_number(value) and math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name}={value!r}: it must be a finite number above 0, an int or a float.")


def require_rows_per_unit(rows: object) -> None:
    """Raise ConfigurationError unless `rows` is a positive int."""
    if not is_count(rows):
        raise ConfigurationError(f"rows_per_unit={rows!r}: give the number of rows of a unit, an int of at least 1.")


def refuse_units(settings: Mapping[str, Any], where: str) -> None:
    """Raise ConfigurationError if `settings` ask for units of several rows."""
    if settings.get("rows_per_unit", 1) != 1:
        raise ConfigurationError(
            f"{where} does not support units of rows_per_unit={settings['rows_per_unit']!r} rows yet. Leave it out, or "
            f"write the loop over engine.batches(...) of your own PrivacyEngine."
        )


def require_probability(name: str, value: float) -> None:
    """Raise ConfigurationError unless 0 < `value` < 1."""
    if not (is_number(value) and 0 < value < 1):
        raise ConfigurationError(f"{name}={value!r}: delta is a probability, strictly between 0 and 1.")


def require_delta(target_delta: float, sample_size: int) -> None:
    """Raise ConfigurationError unless 0 < delta < 1; warn if delta is 1/N or more."""
    require_probability("target_delta", target_delta)
    if target_delta >= 1 / sample_size:
        warnings.warn(
            f"target_delta={target_delta!r} is at least 1/N = {1 / sample_size:g}: at such a delta a mechanism that "
            f"publishes one random sample in the clear counts as private. Choose a delta well below 1/N.",
            stacklevel=3,
        )


def require_choices(
    accountant: Any, loss_reduction: Any, on_budget: Any, secure_mode: Any, noise: Any, verify: Any
) -> None:
    """Raise ConfigurationError unless the engine has these settings."""
    require_choice("accountant", accountant, get_args(AccountantName))
    require_choice("loss_reduction", loss_reduction, get_args(LossReduction))
    require_choice("on_budget", on_budget, ("raise", "continue"))
    require_choice("secure_mode", secure_mode, (False, True))
    require_choice("noise", noise, get_args(NoiseName))
    require_choice("verify", verify, (False, True))
