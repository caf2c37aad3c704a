"""Compare packed units with each unit alone, in a row at its own positions; see [Note: Packed rows]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpshard.clipping.tape import Clipper, Tape
from dpshard.errors import VerificationError
from dpshard.interception import PackedRun, Run, by_unit, is_block_mask
from dpshard.records import Owners
from dpshard.verification.company import verify_additive
from dpshard.verification.gradients import (
    Differentiated,
    Found,
    differentiate,
    sketched_gradients,
    verify_norms_and_sums,
)
from dpshard.verification.kept import objective_of, statistics_kept
from dpshard.verification.objectives import NOTHING_TO_TRAIN, Loss, Objective, require_targets, warn_of_blind_rows
from dpshard.verification.repeated_call import RepeatedCall, RunFailedError
from dpshard.verification.samples import OUTLIER
from dpshard.verification.tolerances import largest_differences, row_bounds, tolerance_across_sizes

WHOLE: list[int] = []

CAUSES = (
    "On packed rows, the likely causes are: attention looks across units (give the model position_ids that restart in "
    "every unit, cumulative lengths, or a block-diagonal mask, and an attention implementation that uses them); "
    "positions do not restart; a convolution, a shift or a recurrence over the row; a loss divided by the number of "
    "tokens, or of units, that were drawn (dpshard.losses.packed_cross_entropy does not)."
)


@dataclass(frozen=True, slots=True)
class PackedLoss(Loss):
    """A user's loss on packed rows; one unit alone gets its part of the targets."""

    run: PackedRun = None  # type: ignore[assignment]

    def of(self, output: Any, samples: Sequence[int]) -> Tensor:
        """Return the loss of one unit alone, or of the whole stream."""
        alone = [self.run.alone(t, samples[0]) for t in self.targets] if len(samples) else self.targets
        return self.loss_fn(output, *alone)


def loss_on(run: Run, loss_fn: Callable[..., Tensor], targets: tuple[Tensor, ...]) -> Loss:
    """Return a user's loss for a run."""
    if isinstance(run, PackedRun):
        return PackedLoss(loss_fn, targets, run=run)
    require_targets(targets, run.rows * run.rows_per_unit)
    warn_of_blind_rows(targets, run.rows)
    return Loss(loss_fn, tuple(by_unit(t, 0, run.rows_per_unit) for t in targets), run.rows_per_unit)


def pick_units(run: PackedRun, start: int, n: int) -> list[int]:
    """Return up to n units, equally many on every rank. One of them follows another unit in its row."""
    units, n = _real(run), min(n, run.rows)
    behind = [unit for unit in units if run.packed.before(unit)]
    last = behind[-1] if behind else units[-1]
    others = [unit for unit in units[start:] + units[:start] if unit != last]  # `start` is below run.rows
    return sorted([last, *others[: n - 1]])


def _real(run: PackedRun) -> list[int]:
    units = sorted(run.packed.places)
    return [unit for unit in units if not run.packed.is_padding[unit]] or units[:1]


def shuffled(x: Tensor, everything: Tensor) -> Tensor:
    """Return numbers halved and in another order, or other ids that occur in `everything`."""
    if x.is_floating_point() or x.is_complex():
        return x.roll(1, 0) / 2
    return _other_ids(x, everything[-len(x) :])


def _other_ids(x: Tensor, others: Tensor) -> Tensor:
    return others if x.dtype == torch.bool else torch.where((x < 0) | (others < 0), x, others)


def verify_packed(
    repeated: RepeatedCall,
    backend: Differentiated,
    clipper: Clipper,
    random: np.random.Generator,
    in_double: Callable[[Callable[..., None], Any], bool],
    *,
    thorough: bool,
) -> None:
    """Raise VerificationError unless each chosen unit has its gradient alone, whatever other units hold."""
    run, chosen = repeated.run, repeated.chosen
    assert isinstance(run, PackedRun)
    _refuse_objects(run)
    run.refuse_absolute_positions()
    together, kept = repeated.leaves(WHOLE)
    _, kept_alone = repeated.leaves(chosen[:1])
    found = [repeated.loss.of] if repeated.loss is not None else _objectives(run, together, chosen)
    model = repeated.replay.parameters.model
    for path in statistics_kept(kept, kept_alone):
        found = [*found, objective_of(model, path, kept[path])]
    del kept, kept_alone
    try:
        verify_units(repeated, backend, clipper, found)
    except VerificationError as error:
        if isinstance(error, RunFailedError) or not in_double(verify_units, found):
            raise
    rounds = [False, True] if thorough else [bool(random.integers(2))]
    for scaled in rounds:
        _verify_company(repeated, random, scaled=scaled)


def _refuse_objects(run: PackedRun) -> None:
    for x in run.leaves:
        if is_block_mask(x) and x.shape[-2:] != (run.packed.shape[1],) * 2:
            raise VerificationError(
                f"{type(run.module).__name__} gets a BlockMask of {x.shape} for packed rows {run.packed.shape}, so no "
                f"unit can run alone. Make it of T by T tokens, or within the model, from position_ids [R, T]."
            )


def _place(run: PackedRun, x: Tensor) -> str | None:
    """Return which dimensions of an output hold tokens, or "units" for [U, ...]."""
    R, T = run.packed.shape
    if x.dim() > 1 and x.shape[:2] == (R, T):
        return "rt"
    if x.dim() > 0 and x.shape[0] == R * T:
        return "n"
    return "units" if x.dim() > 0 and x.shape[0] == run.packed.units else None


def _part(run: PackedRun, x: Tensor, place: str, unit: int) -> Tensor:
    if place == "units":
        return x[unit]
    row, start, end = run.packed.places[unit]
    first = row * run.packed.shape[1]
    return x[row, start:end] if place == "rt" else x[first + start : first + end]


def _objectives(run: PackedRun, together: Sequence[Any], chosen: Sequence[int]) -> list[Objective]:
    """Return the scalar losses, and a random direction at the tokens of `chosen`."""
    found: list[Objective] = []
    seeds: list[tuple[int, str, dict[int, Tensor]]] = []
    generator = torch.Generator().manual_seed(0)
    for i, x in enumerate(together):
        if not isinstance(x, Tensor) or not x.requires_grad:
            continue
        if x.dim() == 0:
            found.append(lambda output, _, i=i: pytree.tree_leaves(output)[i])
            continue
        place = _place(run, x)
        if place is None:
            raise VerificationError(
                f"An output has shape {tuple(x.shape)} on packed rows {run.packed.shape}: neither a row per token nor "
                f"one per unit. Pass the loss: engine.verify(*inputs, loss_fn=..., targets=...)."
            )
        like = {unit: _part(run, x, place, unit) for unit in chosen}
        drawn = {unit: torch.randn(part.shape, generator=generator, dtype=torch.float64) for unit, part in like.items()}
        seeds.append((i, place, {unit: seed.to(like[unit]) for unit, seed in drawn.items()}))
    if not found and not seeds:
        raise VerificationError(NOTHING_TO_TRAIN)

    def along(output: Any, samples: Sequence[int]) -> Tensor:
        leaves = pytree.tree_leaves(output)
        total = torch.zeros((), dtype=torch.float64, device=leaves[seeds[0][0]].device)
        for i, place, seed in seeds:
            for unit in samples or chosen:
                part = leaves[i]
                if not samples or place == "units":
                    part = _part(run, part, place, unit)
                total = total + (part.reshape(seed[unit].shape) * seed[unit]).sum()
        return total

    return [*found, along] if seeds else found


def verify_units(
    repeated: RepeatedCall, backend: Differentiated, clipper: Clipper, objectives: Sequence[Objective]
) -> None:
    """Raise VerificationError unless the norms and clipped sums of `chosen` are those of each unit alone."""
    run, chosen = repeated.run, repeated.chosen
    assert isinstance(run, PackedRun)
    U, (R, T) = run.packed.units, run.packed.shape
    device = next(iter(clipper.roots.values.values())).device
    others_U = torch.ones(U, dtype=torch.bool, device=device)
    others_U[chosen] = False
    owners = Owners(run.packed.owners(device), U)
    repeated.state.rewind(repeated.draws)
    plain = {name: backend.tensors_of(name) for name, p in backend.parameters.items() if p.requires_grad}
    parameters = [x for tensors in plain.values() for x in tensors]
    for objective in objectives:
        found = Found(clipper.roots)
        twin = clipper.twin(found)
        tape = functools.partial(Tape, twin, R * T, others_U, 1.0, owners)
        with repeated.verdict.forward():
            output = repeated.replay.recorded(run, WHOLE, tape, repeated.state, repeated.draws)
        value, singles = objective(output, WHOLE), []
        with repeated.backward():
            differentiate(value, twin.differentiated())
        del output, value
        for i in chosen:
            value = objective(repeated.plain([i]), [i])
            with repeated.backward():
                singles.append(sketched_gradients(value, plain))
        if objective.__name__ == "along":
            _verify_strangers(found.norms, others_U, parameters, half=repeated.half)
        norms = {index: norm_U[chosen] for index, norm_U in found.norms.items()}
        verify_norms_and_sums(
            found.sums,
            singles,
            norms,
            clipper,
            parameters,
            half=repeated.half,
            watched=[True] * len(chosen),
            size=1.0,
            causes=CAUSES,
        )


def _verify_strangers(norms: dict[int, Tensor], others_U: Tensor, parameters: Sequence[Tensor], *, half: bool) -> None:
    for norm_U in norms.values():
        own, strange = norm_U[~others_U].max(), norm_U[others_U].amax() if others_U.any() else norm_U.new_zeros(())
        if bool(strange > tolerance_across_sizes(parameters, half=half) * own):
            raise VerificationError(
                f"Outputs of some units have gradients at the tokens of others (norm {float(strange):.4g}, own "
                f"{float(own):.4g}). {CAUSES}"
            )


def _verify_company(repeated: RepeatedCall, random: np.random.Generator, *, scaled: bool) -> None:
    run = repeated.run
    assert isinstance(run, PackedRun)
    places, units = run.packed.places, _real(run)
    if run.rows < 2 and not run.packed.side_by_side:
        return
    # Neighbouring units are never in the same half.
    rows = random.permutation(run.packed.shape[0])
    order = sorted(units, key=lambda unit: (rows[places[unit][0]], places[unit][1]))
    first, second = sorted(order[::2]), sorted(order[1::2])
    spots = torch.from_numpy(random.permutation(run.packed.unit_ids.numel()))

    def change(x: Tensor, everything: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex():
            return -x * OUTLIER if scaled else x.roll(1, 0).mul(-1)
        return _other_ids(x, everything[spots[: len(x)].to(x.device)])

    def values(changed: list[int]) -> list[Tensor] | None:
        loss = repeated.loss
        if isinstance(loss, PackedLoss) and changed:
            targets = replace(run, leaves=loss.targets, dims=(None,) * len(loss.targets))
            loss = replace(loss, targets=targets.with_contents(changed, change).leaves)
        other = run.with_contents(changed, change) if changed else run
        return repeated.values_if_it_runs(WHOLE, run=other, loss=loss)

    before, after, third = values([]), values(first), values(second)
    if before is None:
        return
    for now, kept in ((after, second), (third, first)):
        for x, y in zip(before, now or (), strict=False):
            place = _place(run, x) if x.dim() else None
            if kept and place is not None and x.shape == y.shape:
                _verify_kept(repeated, [(_part(run, x, place, u), _part(run, y, place, u)) for u in kept])
    scalars = [i for i, x in enumerate(before) if x.dim() == 0]
    if scalars and not scaled and after is not None and third is not None:
        fourth = values(units)
        for i in scalars if fourth is not None else ():
            try:
                verify_additive(repeated, [before[i], after[i], third[i], fourth[i]])  # type: ignore[index]
            except VerificationError as error:
                raise VerificationError(f"{str(error).partition(' Likely causes')[0]} {CAUSES}") from error


def _verify_kept(repeated: RepeatedCall, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    x, y = (
        torch.cat([part.reshape(-1, *(part.shape[1:] or (1,))) for part in parts]) for parts in zip(*pairs, strict=True)
    )
    apart, allowed = largest_differences(x, y), row_bounds(x, half=repeated.half)
    if bool((apart > allowed).any()):
        raise VerificationError(
            f"An output of shape {tuple(x.shape[1:])} per token moves by {float((apart - allowed).max()):.4g} when "
            f"other units of its packed rows change, also under detach() or no_grad(). {CAUSES}"
        )
