"""Remove the longest rows: less padding must not change the outputs of other rows.

If a scale follows the length (dynamic RoPE), one long document affects all others. So the longest rows are removed.
Columns at either end go, too, if no integer input of another row changes there. A mask must be 0 there. Without a mask,
two rows or more must hold one id there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dpshard.errors import DpshardError, VerificationError
from dpshard.interception import Run
from dpshard.verification.repeated_call import RepeatedCall
from dpshard.verification.tolerances import largest_differences, scale, tolerance_across_sizes


def verify_lengths(repeated: RepeatedCall) -> None:
    """Raise VerificationError if the outputs of other rows depend on the longest rows."""
    for at_end in (True, False):
        found = _without_longest(repeated.run, at_end=at_end)
        if found is None:
            continue
        short, length, rest = found
        long = repeated.run.leaves[_sequences(repeated.run)[0]].shape[1]
        before = repeated.values(rest)
        try:
            after = repeated.values(list(range(len(rest))), run=short)
        except DpshardError:
            return  # the shape of another input depends on the length
        for x, y in zip(before, after, strict=True):
            if not x.is_floating_point():
                continue  # at another size, rounding may decide ties in another way
            if x.dim() == 0 and y.dim() == 0 and _is_masked(repeated.run, rest, at_end=at_end):
                x, y = x[None], y[None]
            elif x.dim() < 1 or len(x) != len(rest) or x.dim() != y.dim():
                continue
            if x.dim() > 1 and x.shape[1] == long and y.shape[1] == length:
                x = x[:, :length] if at_end else x[:, long - length :]
            if x.shape != y.shape:
                continue
            kept = _content(repeated.run, rest, length, x, at_end=at_end)
            x, y = x.masked_fill(~kept, 0), y.masked_fill(~kept, 0)
            if bool((largest_differences(x, y) > tolerance_across_sizes([x], half=repeated.half) * scale(x)).any()):
                raise VerificationError(
                    f"Without its longest rows, which pad this micro-batch from {length} to {long} positions, the "
                    f"other rows have other outputs. One long sample affects all of them (RoPE scaled by the length: "
                    f"dynamic, longrope; padding without a mask). Pad all micro-batches to one length, or switch the "
                    f"scaling off."
                )


def _sequences(run: Run) -> list[int]:
    found = [
        i
        for i, (x, dim) in enumerate(zip(run.leaves, run.dims, strict=True))
        if dim == 0 and x.dim() == 2 and not x.is_floating_point() and not x.is_complex()
    ]
    return [i for i in found if run.leaves[i].shape[1] == run.leaves[found[0]].shape[1]]


def _padding(run: Run, *, at_end: bool) -> Tensor:
    """Return [B]: how many positions at one end have one value in every integer input. 1 counts as 0."""
    inputs = [run.leaves[i][: run.rows] for i in _sequences(run)]
    inputs = [x.flip(1) for x in inputs] if at_end else inputs
    alike = torch.stack([x.diff(dim=1) == 0 for x in inputs]).all(0)
    repeated = alike.long().cumprod(1).sum(1)
    padding = repeated + (repeated > 0)
    masks = [x for x in inputs if bool(((x == 0) | (x == 1)).all()) and bool(x.any(1).all())]
    for mask in masks:
        padding = padding * (mask[:, 0] == 0)
    if not masks:
        first = inputs[0][:, 0]
        padding = padding * ((first[:, None] == first[padding > 0]).sum(1) > 1)
    return padding.cpu()


def _without_longest(run: Run, *, at_end: bool) -> tuple[Run, int, list[int]] | None:
    """Return the run, its length, and the remaining rows."""
    leaves = _sequences(run)
    if not leaves or run.rows < 2:
        return None
    padding = _padding(run, at_end=at_end)
    rest = (padding > padding.min()).nonzero()[:, 0].tolist()
    long = run.leaves[leaves[0]].shape[1]
    cut = int(padding[rest].min()) if rest else long
    if cut >= long:
        return None
    length = long - cut
    index = torch.tensor(rest)
    kept = []
    for x, dim in zip(run.leaves, run.dims, strict=True):
        if isinstance(x, Tensor):
            if dim is not None:
                x = x.detach().index_select(dim, index.to(x.device))
            for d in range(x.dim()):
                if d != dim and x.shape[d] == long:
                    x = x.narrow(d, 0 if at_end else cut, length)
        kept.append(x)
    return replace(run, leaves=tuple(kept), batch_size=len(rest), rows=len(rest)), length, rest


def _is_masked(run: Run, rest: list[int], *, at_end: bool) -> bool:
    found = [run.leaves[i][rest] for i in _sequences(run)]
    ends = [x[:, -1 if at_end else 0] for x in found]
    shortest = int(_padding(run, at_end=at_end)[rest].argmax())
    masks = (bool(((x == 0) | (x == 1)).all()) and not bool(end[shortest]) for x, end in zip(found, ends, strict=True))
    return any(masks) or any(bool(end[shortest] < 0) for end in ends)


def _content(run: Run, rest: list[int], length: int, x: Tensor, *, at_end: bool) -> Tensor:
    if x.dim() < 2 or x.shape[1] != length:
        return torch.ones_like(x, dtype=torch.bool)
    padding = _padding(run, at_end=at_end)[rest]
    long = run.leaves[_sequences(run)[0]].shape[1]
    content = (long - padding)[:, None]
    positions = torch.arange(length)[None]
    kept = positions < content if at_end else positions >= length - content
    return kept.reshape(*kept.shape, *[1] * (x.dim() - 2)).expand_as(x.cpu()).to(x.device)
