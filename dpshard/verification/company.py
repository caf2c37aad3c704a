"""Change the inputs of some rows, and the order: outputs and losses of other rows must not change.

Rows K, a random half, get other inputs. Outputs of the other rows J must not change. A sum of losses of single samples
is additive: L(K, J) - L(K', J) - L(K, J') + L(K', J') = 0. All ranks change K at once, so that a forward which gathers
other ranks' rows is detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from dpshard.errors import VerificationError
from dpshard.interception import AS_DRAWN, Draws, Run
from dpshard.verification.objectives import sample_dim
from dpshard.verification.repeated_call import RepeatedCall
from dpshard.verification.samples import replaced, replaced_targets
from dpshard.verification.tolerances import differ, largest_differences, row_bounds, scale


class Others(Enum):
    """The inputs that changed rows get."""

    MOVED = auto()  # each row gets those of another row
    SCALED = auto()  # outliers
    ONE = auto()  # the same in all rows, to exhaust a shared capacity


def verify_company(
    repeated: RepeatedCall,
    shapes: tuple[Sequence[Tensor], Sequence[Tensor]],
    random: np.random.Generator,
    draws: Sequence[tuple[Draws, Others]],
    *,
    both: bool,
) -> None:
    """Raise VerificationError if other inputs in some rows change outputs or losses of the other rows.

    `shapes`: outputs for the chosen samples, and for the first of them alone. `both`: change each half in turn.
    """
    run, loss = repeated.run, repeated.loss
    if run.rows < 2 or len(repeated.chosen) < 2:
        return
    everyone = list(range(run.batch_size))
    places = [sample_dim(x, y, len(repeated.chosen)) for x, y in zip(*shapes, strict=True)]
    for draw, others in draws:
        repeated.draws = draw
        order = random.permutation(run.rows).tolist()
        first, second = sorted(order[: run.rows // 2]), sorted(order[run.rows // 2 :])
        source = _others(run, order, crowded=others is Others.ONE)
        before = repeated.values(everyone)
        if draw == AS_DRAWN:
            _verify_order(repeated, before, places)

        def with_others(changed: list[int], *, scaled: bool, source: list[int] = source) -> list[Tensor] | None:
            rows = [source[i] if i in changed else i for i in everyone]
            other = replaced(run, rows, changed[:1], changed) if scaled else replaced(run, rows)
            return repeated.values_if_it_runs(
                everyone, run=other, loss=None if loss is None else replaced_targets(loss, rows)
            )

        scaled = others is Others.SCALED  # an outlier would hide a small term of a loss
        after = with_others(first, scaled=scaled)
        if after is None and scaled:
            scaled, after = False, with_others(first, scaled=False)
        scalars = [i for i, x in enumerate(before) if x.dim() == 0 and (i >= len(places) or places[i] is None)]
        # With one half changed, a mask by a threshold may stay the same.
        third = with_others(second, scaled=scaled) if both or scalars else None
        for now, kept in ((after, second), (third, first)):
            _verify_rows(repeated, before, now, places, kept)
        if after is None or third is None:
            continue
        if scalars and not scaled:
            fourth = with_others(first + second, scaled=False)
            if fourth is None:
                continue
            for i in scalars:
                verify_additive(repeated, [before[i], after[i], third[i], fourth[i]])


def _verify_order(repeated: RepeatedCall, before: Sequence[Tensor], places: Sequence[tuple[int, int] | None]) -> None:
    """Verify outputs of the reversed rows, because sorting may keep one order.

    In reverse, padding comes first, where it may use up a capacity.
    """
    everyone = range(repeated.run.batch_size)
    turned = repeated.values_if_it_runs(everyone[::-1], run=repeated.run)
    if turned is None:
        return  # it expects sorted lengths
    for i, place in enumerate(places):
        if place is not None and _has_rows(turned[i], place, len(everyone)):
            turned[i] = turned[i].unflatten(place[0], (-1, place[1])).flip(place[0]).flatten(place[0], place[0] + 1)
    _verify_rows(repeated, before, turned, places, everyone)


def _others(run: Run, order: list[int], *, crowded: bool) -> list[int]:
    if crowded:
        return [order[0]] * run.batch_size
    shift = 1 + order[0] % (run.rows - 1)
    return [(i + shift) % run.rows for i in range(run.batch_size)]


def _verify_rows(
    repeated: RepeatedCall,
    before: Sequence[Tensor],
    after: Sequence[Tensor] | None,
    places: Sequence[tuple[int, int] | None],
    kept: Sequence[int],
) -> None:
    for x, y, place in zip(before, after or (), places, strict=False):
        if place is not None and x.shape == y.shape and _has_rows(x, place, repeated.run.batch_size):
            _verify_moved(repeated, x, y, place, kept)


def _has_rows(x: Tensor, place: tuple[int, int], samples: int) -> bool:
    return x.dim() > place[0] and x.shape[place[0]] == samples * place[1]


def _verify_moved(repeated: RepeatedCall, x: Tensor, y: Tensor, place: tuple[int, int], kept: Sequence[int]) -> None:
    dim, rows = place
    mine = torch.tensor([i * rows + k for i in kept for k in range(rows)], device=x.device)
    x, y = (z.movedim(dim, 0).index_select(0, mine) for z in (x, y))
    if not x.is_floating_point():
        _verify_choices(x, y)
        return
    apart, size, allowed = largest_differences(x, y), scale(x), row_bounds(x, half=repeated.half)
    if bool((apart > allowed).any()):
        worst = int((apart - allowed).argmax())
        raise VerificationError(
            f"An output of shape {tuple(x.shape[1:])} per row moves by {float(apart[worst]):.4g} (of "
            f"{float(size[worst]):.4g}) when the inputs of other samples change: {_MIXES}"
        )


def _verify_choices(x: Tensor, y: Tensor) -> None:
    apart = int((x != y).sum())
    if apart > TIES * x.numel():
        raise VerificationError(
            f"{apart} of {x.numel()} elements of an output ({str(x.dtype).removeprefix('torch.')}, shape "
            f"{tuple(x.shape[1:])} per row) change when the inputs of other samples do: {_MIXES}"
        )


TIES = 1e-4
"""Share of whole numbers that rounding may change."""
_MIXES = (
    "the model mixes the samples of a micro-batch, also under detach() or no_grad() (it subtracts or divides by a mean "
    "or maximum over the batch; mixup; samples share a capacity, or one scale of quantisation), or those of several "
    "ranks. So the loss of an output depends on other samples. Compute such values from each sample separately, and "
    "let no sample displace another."
)


def verify_additive(repeated: RepeatedCall, losses: Sequence[Tensor]) -> None:
    """Raise VerificationError unless the change of losses for both halves is the sum of the changes for each."""
    a, b, c, d = (float(x) for x in losses)
    largest = max(abs(a), abs(b), abs(c), abs(d))
    if not np.isfinite(largest):
        return
    whole = not losses[0].is_floating_point()
    rounding = 0.0 if whole else 4e-3 if repeated.half else 64 * torch.finfo(losses[0].dtype).eps
    apart = abs((a - b) - (c - d))
    if apart > rounding * largest:
        raise VerificationError(
            f"The loss is not a sum of losses of single samples. With other inputs in one half of the rows it "
            f"changes by {b - a:.6g} or by {d - c:.6g}, depending on the other half. Likely causes: a mean over the "
            f"tokens, or the valid rows, of the whole micro-batch (dpshard.losses.sample_losses takes each sample's "
            f"own). Or class weights with reduction='mean', a contrastive or balancing loss, a penalty on a group or "
            f"on a statistic of the batch."
        )


def verify_other_ranks(repeated: RepeatedCall, rank: int, world_size: int) -> None:
    """Raise VerificationError if inputs of other ranks change anything on this rank. All ranks must call it."""
    if world_size == 1 or repeated.run.rows < 2:
        return
    everyone = list(range(repeated.run.batch_size))
    before = repeated.values(everyone)
    apart = False
    for parity in (0, 1):  # a rank raises only after all ranks have run
        run, loss = repeated.run, repeated.loss
        if rank % 2 == parity:
            rows = [0] * run.batch_size
            run, loss = replaced(run, rows), None if loss is None else replaced_targets(loss, rows)
        after = repeated.values(everyone, run=run, loss=loss)
        if rank % 2 != parity:
            for x, y in zip(before, after, strict=True):
                apart = apart or differ(x, y, half=repeated.half)
    if apart:
        raise VerificationError(
            "An output on this rank moves when the inputs of other ranks change. The model gathers or reduces over "
            "ranks in forward (SyncBatchNorm, a contrastive loss over gathered features, a global mean). So no "
            "per-sample gradient exists. Leave such collectives out of the model and its loss."
        )
