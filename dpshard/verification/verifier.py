"""When to verify a model, and by which comparisons.

A model is verified at the first forward on every kind of input, and with more samples than before, up to 4. It is
verified at steps 1, 2, 4, 8, ..., on a micro-batch that the run's key draws. It is verified at the first change of an
attribute, and at a new longest length. The first label below 0, or position beyond the length, counts as well.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpshard.backends.communicator import Communicator
from dpshard.backends.sharding import Sharding
from dpshard.clipping.tape import Clipper
from dpshard.errors import BatchLayoutError, ConfigurationError, VerificationError
from dpshard.interception import AS_DRAWN, HIGH, LOW, Draws, PackedRun, Replay, Run
from dpshard.randomness import RandomSource, derive_key
from dpshard.verification.backward_memory import verify_backward_memory
from dpshard.verification.company import Others, verify_company, verify_other_ranks
from dpshard.verification.gradients import verify_gradients
from dpshard.verification.kept import objective_of, rows_kept, statistic_error, statistics_kept
from dpshard.verification.lengths import verify_lengths
from dpshard.verification.memory import Counters, others_of, verify_memory
from dpshard.verification.objectives import Loss, Objective, objectives
from dpshard.verification.packed import pick_units, shuffled, verify_packed
from dpshard.verification.repeated_call import RepeatedCall, RunFailedError, is_compared
from dpshard.verification.samples import SAMPLES, has_numbers, pick
from dpshard.verification.verdict import Verdict
from dpshard.verification.watch import Watch
from dpshard.verification.wide import OnOneRank, can_widen, widened

ENOUGH = 4
"""Number of samples in a batch from which on more samples need no further verification."""

_COUNTED = (
    "{}: every forward changes this, and its output with it, as by a count of forwards. Each sample that is drawn may "
    "add a micro-batch, and so a forward. So epsilon holds if a sample's gradient becomes zero, but not if the sample "
    "is removed: others then meet other counts. Count steps in the loop, or take one micro-batch per step "
    "(micro_batch_size >= max_batch_size)."
)

Moment = tuple[int, int | None, int]
"""Step, index of the micro-batch (None in a user's own loop), and number of micro-batches."""


class Verifier:
    """Verifies a model before its first forward, and when it changes."""

    def __init__(
        self,
        sharding: Sharding,
        ranks: Communicator,
        clipper: Clipper,
        moment: Callable[[], Moment],
        secret: Callable[[], bytes],
        *,
        mean: bool,
        moved: bool,
    ) -> None:
        """Take `moved`: True if, without one sample, other samples may be in other micro-batches."""
        self._sharding, self._ranks, self._clipper, self._moved = sharding, ranks, clipper, moved
        self._moment, self._secret, self._mean = moment, secret, mean
        # Largest number of samples verified, by (kind, dimensions of size 1).
        self._kinds: dict[tuple[Any, Any], int] = {}
        self._steps: set[tuple[int, Any]] = set()
        self._watch = Watch()
        self._owed = False
        self._counted = ""  # paths of counters of forwards that change outputs
        self._last: tuple[Replay, Run] | None = None

    def before_forward(self, replay: Replay, run: Run, kind: Any) -> None:
        """Verify `run` if new, due or changed."""
        meets, news = self._meets(replay, run), False
        several = not meets and not isinstance(run, PackedRun)  # numbers of samples may differ by rank
        sized = kind, _dimensions_of_one(run) if several else None
        new = self._kinds.get(sized, 0) < (min(run.rows, ENOUGH) if several else 1)
        if isinstance(run, PackedRun) and run.packed.everywhere is None:
            if not (run.packed.places or meets):
                return  # no token has a unit, so nothing is recorded
            if meets:
                run, new = self._agreed(run, new)
        due = self._is_due(run, kind)
        if not meets:
            news = self._watch.take_news(run, self._moment()[0])
        if new or due or news or self._owed:
            thorough, self._owed = new or news or self._owed, True  # still due if it fails
            self.verify(replay, run, None, thorough=thorough)
            self._kinds[sized] = max(self._kinds.get(sized, 0), run.rows)
            self._owed = False
        if self._counted and self._moment()[2] > 1:
            warnings.warn(_COUNTED.format(self._counted), stacklevel=2)
            self._counted, self._moved = "", False  # once
        self._last = (replay, run)

    def before_release(self) -> None:
        """Verify on the last micro-batch if the model has changed anew."""
        last, self._last = self._last, None
        if last is not None and not self._meets(*last) and self._watch.take_changes(self._moment()[0]):
            self._owed = True
            self.verify(*last, None, thorough=True)
            self._owed = False

    def _agreed(self, run: PackedRun, new: bool) -> tuple[PackedRun, bool]:
        """Return `run` with facts that hold on all ranks, and True if it is new on any rank."""
        own = [len(run.packed.places), not run.packed.side_by_side, not new]
        rows, apart, known = self._ranks.all_gather(torch.tensor(own, device="cpu").long()).amin(0).tolist()
        if rows == 0:
            raise BatchLayoutError(
                "The rows of a rank hold no unit, and ranks that share a model verify it together. Give every rank at "
                "least one unit in every micro-batch, or use engine.batches(..., packing=...)."
            )
        return replace(run, rows=rows, packed=replace(run.packed, planned_beside=not apart)), not known

    def _meets(self, replay: Replay, run: Run) -> bool:
        """Return True if all ranks must run equally many forwards, so that none may verify by itself."""
        return self._sharding.meeting is not None or replay.parameters.unshards(run.module)

    def _is_due(self, run: Run, kind: Any) -> bool:
        step, position, count = self._moment()
        if step == 0 or step & (step - 1) or run.rows < 2 or (step, kind) in self._steps:
            return False
        if position is not None and position < self._random(step).integers(count):
            return False
        self._steps.add((step, kind))
        return True

    def _random(self, step: int) -> np.random.Generator:
        words = RandomSource(derive_key(self._secret(), "verify", step)).words(4)
        return np.random.default_rng([int(word) for word in words])

    def verify(self, replay: Replay, run: Run, loss: Loss | None, *, thorough: bool) -> None:
        """Raise VerificationError unless every sample has its own gradient, by `loss` or by all outputs.

        Unless `thorough`, each call makes only some of the costly comparisons.
        """
        sharding = self._sharding
        sharding.refuse_changed_parameters()
        random = self._random(self._moment()[0])
        if isinstance(run, PackedRun):
            self._verify_packed(replay, run, loss, random, thorough=thorough)
            return
        chosen = pick(run, loss) if thorough else pick(run, loss, int(random.integers(run.rows)), 2)
        if sharding.meeting is not None:
            chosen = sharding.meeting.agreed(chosen)  # ranks may have other parts of a sample
        if thorough:
            fixed = [(AS_DRAWN, Others.MOVED), (LOW, Others.SCALED), (HIGH, Others.ONE)]
            draws = [*fixed, (Draws.fresh(random), Others.MOVED)]
        else:
            draws = [(Draws.fresh(random), list(Others)[random.integers(3)])]
        apart = sharding.parts is not None and sharding.parts.of_samples
        with self._repeated(replay, run, loss, chosen, draws[0][0], with_ranks=apart) as repeated:
            (together, kept), (alone, kept_alone) = repeated.leaves(chosen), repeated.leaves(chosen[:1])
            repeated.kept = rows_kept(kept, kept_alone, len(chosen))
            shapes = (
                [x for x in together if is_compared(x)] + [kept[path] for path in repeated.kept],
                [x for x in alone if is_compared(x)] + [kept_alone[path] for path in repeated.kept],
            )
            statistics = {path: kept[path] for path in statistics_kept(kept, kept_alone)}
            del kept, kept_alone
            # With an outlier, verify_company cannot compare losses.
            gradients = thorough or draws[0][1] is Others.SCALED or self._moment()[0].bit_length() % 2 == 1
            counters = Counters()
            if thorough or not gradients:
                counters = verify_memory(repeated, others_of(repeated), thorough=thorough)
            if thorough:
                verify_other_ranks(repeated, self._ranks.rank, self._ranks.world_size)
            found = [loss.of] if loss is not None else objectives(together, alone, chosen, mean=self._mean)
            del together, alone
            if gradients:
                self._compare_gradients(repeated, found, random, thorough=thorough and len(chosen) > 1)
                self._compare_kept(repeated, statistics, random)
            if thorough and sharding.parts is None:
                self._compare_after_backward(repeated, found[-1])
            verify_company(repeated, shapes, random, draws, both=thorough)
            repeated.draws = AS_DRAWN
            if self._watch.lengths_vary and not self._meets(replay, run) and run.rows_per_unit == 1:
                verify_lengths(repeated)
        self._accept(replay, counters)

    @contextmanager
    def _repeated(
        self, replay: Replay, run: Run, loss: Loss | None, chosen: list[int], draws: Draws, *, with_ranks: bool
    ) -> Iterator[RepeatedCall]:
        verdict, sharding = Verdict(self._ranks if with_ranks else None), self._sharding
        with verdict.shared(), sharding.guard_disabled(), replay.isolate(run.module) as state, torch.enable_grad():
            repeated = RepeatedCall(replay, state, run, loss, self._mean, chosen, draws, verdict=verdict)
            repeated.backward = sharding.dry_backward
            yield repeated

    def _verify_packed(
        self, replay: Replay, run: PackedRun, loss: Loss | None, random: np.random.Generator, *, thorough: bool
    ) -> None:
        if not run.packed.places:
            return
        chosen = pick_units(run, int(random.integers(run.rows)), SAMPLES if thorough else 2)
        together = replay.parameters.unshards(run.module)
        draws = AS_DRAWN if thorough else Draws.fresh(random)
        with self._repeated(replay, run, loss, chosen, draws, with_ranks=together) as repeated:
            double = functools.partial(self._agrees_in_double, repeated)
            verify_packed(repeated, self._sharding, self._clipper, random, double, thorough=thorough)
            repeated.draws = AS_DRAWN
            others = [run.with_contents(chosen[:1], shuffled)]
            counters = verify_memory(repeated, others, thorough=thorough)
        self._accept(replay, counters)

    def _accept(self, replay: Replay, counters: Counters) -> None:
        if self._moved and counters.decide:
            self._counted = ", ".join(sorted(counters.paths))
        self._watch.accept(replay.parameters.model, counters.paths)

    def _compare_gradients(
        self, repeated: RepeatedCall, found: Any, random: np.random.Generator, *, thorough: bool
    ) -> None:
        ways: list[tuple[int | None, bool]] = [(None, bool(random.integers(2)))]  # outlier, magnified gradients
        if thorough:
            ways = [(None, False), (repeated.chosen[-1] if has_numbers(repeated.run) else None, True)]
        for scaled, magnified in ways:
            both = thorough and not magnified
            compare = functools.partial(verify_gradients, outlier=scaled, magnified=magnified, both_orders=both)
            try:
                compare(repeated, self._sharding, self._clipper, found)
            except (AttributeError, TypeError):
                self._sharding.refuse_hooks()  # torch calls a user's hook with None if no gradient comes
                raise
            except ConfigurationError:  # the backward communicates
                raise
            except (RuntimeError, ValueError, IndexError) as error:
                differs = isinstance(error, VerificationError) and not isinstance(error, RunFailedError)
                if not differs and scaled is not None:
                    continue  # forward fails on made-up numbers
                if (
                    not differs
                    or self._sharding.meeting is not None
                    or not self._agrees_in_double(repeated, compare, found)
                ):
                    raise

    def _compare_after_backward(self, repeated: RepeatedCall, objective: Objective) -> None:
        repeated.state.rewind(repeated.draws)  # the last forward may have frozen parameters
        sharding = self._sharding
        trained = {name: sharding.tensors_of(name) for name, p in sharding.parameters.items() if p.requires_grad}
        verify_backward_memory(repeated, others_of(repeated)[-1], objective, trained)

    def _compare_kept(
        self, repeated: RepeatedCall, statistics: Mapping[str, Tensor], random: np.random.Generator
    ) -> None:
        if len(repeated.chosen) < 2:
            return
        for path, like in statistics.items():
            objective = objective_of(repeated.replay.parameters.model, path, like)
            try:
                self._compare_gradients(repeated, [objective], random, thorough=False)
            except VerificationError as error:
                raise statistic_error(path, error) from error

    def _agrees_in_double(self, repeated: RepeatedCall, compare: Callable[..., None], found: Any) -> bool:
        if not can_widen(repeated, self._sharding):
            return False
        repeated.state.rewind(repeated.draws)
        one_rank = OnOneRank() if self._ranks.world_size > 1 else nullcontext()
        with widened(repeated, self._clipper) as (wide, parameters, clipper), one_rank:
            if wide.loss is not None:
                found = [wide.loss.of]
            try:
                compare(wide, parameters, clipper, found)
            except (RuntimeError, TypeError):  # for example, the model cannot compute in float64
                return False
            return True


def _dimensions_of_one(run: Run) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(place for place, size in enumerate(x.shape) if size == 1 and place != dim)
        for x, dim in zip(run.leaves, run.dims, strict=True)
        if isinstance(x, Tensor)
    )
