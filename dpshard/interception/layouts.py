"""The batch dimensions of inputs and calls, found by probes.

[Note: Layouts by size]
A forward may cut samples into pieces, [k * B, ...]. The pieces of a sample then lie one batch apart, or side by side.
Both orders are equal while each sample has one piece. So inputs of another size, or with another integer, are probed
again. Ranks may have inputs of different lengths. So where all ranks must probe equally often, the probe of the first
size serves all sizes. Each number of samples is probed once, too, because it may decide which functions run.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.errors import BatchLayoutError, DpshardError, UnsupportedParameterError
from dpshard.interception.batch_dims import Layout, find_layout, merge
from dpshard.interception.call import ForwardContext
from dpshard.interception.isolation import Isolate
from dpshard.interception.kinds import kind_of_run, sizes_of_run
from dpshard.interception.mode import InterceptionMode
from dpshard.interception.parameters import TrainedParameters
from dpshard.interception.plans import Plans
from dpshard.interception.protocols import ShardingHooks
from dpshard.interception.refusals import refuse_compiled_autograd
from dpshard.interception.run import Run
from dpshard.interception.slots import Slots

ATTEMPTS = 8
"""Most attempts of one forward, which restarts after a probe when a call has no layout."""
_MOST_PLANS = 64
_MOST_INTEGERS = 64
"""Most values of integer inputs with probes of their own; a counter has more values."""
NEW_COURSE = (
    "The model runs different functions in every forward, so dpshard cannot find the samples of their inputs. Remove "
    "control flow that depends on random numbers or on the data of a single sample."
)
_OUT_OF_SIGHT = (
    "torch.cond, while_loop, scan or map runs code that uses a parameter, and hides its samples from dpshard. Write it "
    "as a Python loop or branch, or compute both branches and choose by torch.where."
)


Key = tuple[Any, Any, Any]


class Layouts:
    """The layouts of one model."""

    def __init__(
        self,
        parameters: TrainedParameters,
        sharding: ShardingHooks,
        isolate: Isolate,
        *,
        verified: bool,
        alone: bool,
    ) -> None:
        self.found: dict[Key, Layout] = {}
        """By `key`. Equal layouts of one kind are the same object, so that they share plans."""
        self._of_kind: dict[Any, list[Layout]] = {}
        self._integers: dict[Any, set[tuple[int, ...]]] = {}  # integer inputs seen, by kind
        self._plans: dict[Any, Plans] = {}
        self._probed_whole: set[Any] = set()  # pairs (kind of inputs, number of samples)
        self._readings: dict[Any, tuple[int | None, ...]] = {}
        # Batch dimensions that a probe has corrected, by key.
        self._parameters, self._sharding, self._isolate = parameters, sharding, isolate
        self._verified, self._alone = verified, alone

    def key(self, run: Run) -> Key:
        """Return the kind of the inputs, their sizes and integers; see [Note: Layouts by size]."""
        kind = kind_of_run(run)
        if self._sharding.note_inputs is not None or self._parameters.unshards(run.module):
            return kind, None, None
        integers, known = tuple([x for x in run.leaves if type(x) is int]), self._integers.setdefault(kind, set())
        if len(known) < _MOST_INTEGERS:
            known.add(integers)
        return kind, sizes_of_run(run), integers if integers in known else None

    def of(self, run: Run) -> Layout:
        """Return the layout for inputs of a probed kind; probe first if their size is new."""
        key = self.key(run)
        return self.found[key] if key in self.found else self._keep(key, self.probe(run, into={}))

    def _keep(self, key: Key, layout: Layout) -> Layout:
        alike = self._of_kind.setdefault(key[0], [])
        known = next((other for other in alike if other == layout), None)
        if known is None:
            alike.append(layout)
            known = layout
        self.found[key] = known
        return known

    def plans(self, layout: Layout, batch_size: int) -> Plans:
        """Return the plans for inputs with this layout."""
        key = id(layout), batch_size
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) == _MOST_PLANS:  # loops without padding have many batch sizes
                self._plans.clear()
            plans = self._plans[key] = Plans(layout)
        return plans

    def mode(self, run: Run, layout: Layout, slots: Slots) -> InterceptionMode:
        """Return a mode that records the call in `slots`."""
        parameters, plans = self._parameters, self.plans(layout, slots.batch_size)
        context = ForwardContext(parameters.refusal, run.rows_per_unit, run.grid, parameters.exchange)
        mode = InterceptionMode(parameters.trainable(), layout, slots, context)
        mode.plans, mode.rehearsals = plans if run.grid is None else None, plans.rehearsals
        mode.trained = parameters.trained
        return mode

    def as_read(self, run: Run) -> Run:
        """Return `run` with the batch dimensions that a probe has corrected, if any."""
        dims = self._readings.get(self.key(run)) if self._readings else None
        return run if dims is None else run.reading(dims)

    def probed(self, run: Run) -> tuple[Run, Key]:
        """Return `run`, as read, and its key, after a probe if the inputs are new.

        If the probe fails, a dimension may equal the batch size by chance. So other batch dimensions are tried.
        """
        key = self.key(run)
        if key in self.found:
            return run, key
        if run.rows == 1 < run.rows_per_unit and (of_several := self.key(replace(run, rows=2))) in self.found:
            self.found[key] = self.found[of_several]  # a probe of one unit shows less than one of several
            return run, key
        try:
            self._keep(key, self.probe(run, into={}))
            return run, key
        except BatchLayoutError:
            if self._parameters.unshards(run.module):  # all ranks must probe equally often
                raise
            for reading in run.other_readings():
                read = self.key(reading)
                try:
                    self._keep(read, self.probe(reading, into={}))
                except BatchLayoutError:
                    continue
                self._readings[key] = reading.dims
                return reading, read
            raise

    def probe(self, run: Run, into: Layout) -> Layout:
        """Run the model on 2 and on 3 samples, and add the calls to `into`."""
        refuse_compiled_autograd()  # here, because probes are rare
        if run.grid is not None:
            return into  # shapes show where the tokens of packed rows are
        if into:
            self._plans.clear()  # they may hold earlier layouts
        unshards = self._parameters.unshards(run.module)
        try:
            found = self._compare(run, unshards=unshards)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, DpshardError):
                raise
            if not unshards:  # with sharded parameters, ranks that have not failed would not take part
                self._try_whole(run)
            cut = [(tuple(x.shape), d) for x, d in zip(run.given, run.dims, strict=True) if isinstance(x, Tensor)]
            raise BatchLayoutError(
                f"{type(run.module).__name__} failed on 2 or 3 of its {run.batch_size} samples ({error}). Its inputs "
                f"were cut along (shape, dimension) {cut}, where dpshard expects the samples. Pass tensors without "
                f"samples as buffers or constants rather than as inputs, and pass all rows of a micro-batch."
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise UnsupportedParameterError(f"{type(run.module).__name__}: {_OUT_OF_SIGHT}") from error
        merge(into, found)
        return into

    def _compare(self, run: Run, *, unshards: bool) -> Layout:
        with self._sharding.dry_run(), self._isolate(run.module) as state, torch.enable_grad():
            outputs: dict[int, list[torch.Size]] = {}

            def forward(n: int, rows: int) -> None:
                state.rewind()
                output = state.guarded(functools.partial(run.on, [i % rows for i in range(n)]))
                outputs[n] = [x.shape for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]

            whole = self._whole(run, unshards=unshards)

            def found(rows: int) -> Layout:
                layout = find_layout(
                    functools.partial(forward, rows=rows),
                    self._parameters.trainable,
                    rows_per_unit=run.rows_per_unit,
                    whole=whole,
                    verified=self._tells_order(run),
                    exchange=self._parameters.exchange,
                )
                if whole is not None:
                    self._probed_whole.add((kind_of_run(run), whole))
                if self._sharding.passes_rows:
                    _require_rows_first(outputs[2], outputs[3])
                return layout

            # If the second run has no new sample, both runs take the same branches.
            alike = min(2, run.rows)
            if unshards:  # all ranks must run equally often
                return found(alike)
            try:
                return found(run.rows)
            except BatchLayoutError:
                return found(alike)

    def _whole(self, run: Run, *, unshards: bool) -> int | None:
        """Return a number of samples to probe besides 2 and 3; None if this number and kind were probed."""
        n = max(run.batch_size, 4) if unshards else run.batch_size
        return None if n <= 3 or (kind_of_run(run), n) in self._probed_whole else n

    def _tells_order(self, run: Run) -> bool:
        """Return True if verification finds wrong orders of equal rows, or if such orders do not matter.

        With one unit, a wrong order only mixes it with its own copies. But another rank may have two units.
        """
        if run.rows > 1:
            return self._verified
        return self._alone or run.batch_size == 1

    def _try_whole(self, run: Run) -> None:
        """Run the model on all samples, to raise an error that the cut of the inputs did not cause."""
        with self._isolate(run.module) as state, torch.no_grad():
            state.guarded(functools.partial(state.run_plain, run, list(range(run.batch_size))))


def _require_rows_first(few: list[torch.Size], more: list[torch.Size]) -> None:
    for small, large in zip(few, more, strict=True):
        if small[1:] != large[1:]:
            raise BatchLayoutError(
                f"A stage of a pipeline returned a tensor of shape {list(small)} for 2 samples, {list(large)} for 3. "
                f"The next stage takes the first dimension for the samples: transpose the output within this stage."
            )
