"""Remove the longest rows: less padding must not change the outputs of other rows.

If a scale follows the length (dynamic RoPE), one long document affects all others. So the longest rows are removed.
Columns at either end go, too, if no integer input of another row changes there. A mask must be 0 there. Without a mask,
two rows or more must hold one id there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpshard.errors import DpshardError, VerificationError
from dpshard.interception import Run
from dpshard.verification.repeated_call import RepeatedCall
from dpshard.verification.tolerances import largest_differences, scale, tolerance_across_sizes


@dataclass(frozen=True)
class _Shorter:
    """A run without its longest rows."""

    run: Run
    rest: list[int]
    """Its rows, as rows of the whole run."""
    long: int
    length: int
    """Positions with and without the longest rows."""
    padding_R: Tensor
    """Padding of its rows among `long` positions."""
    at_end: bool

    def at_its_positions(self, x: Tensor) -> Tensor:
        """Return the first or last `length` positions, dimension 1, of an output of the whole run."""
        return x[:, : self.length] if self.at_end else x[:, self.long - self.length :]

    def content(self, x: Tensor) -> Tensor:
        """Return an output with zeros on padding."""
        if x.dim() < 2 or x.shape[1] != self.length:
            return x
        content = (self.long - self.padding_R)[:, None]
        positions = torch.arange(self.length)[None]
        kept = positions < content if self.at_end else positions >= self.length - content
        return x.masked_fill(~kept.reshape(*kept.shape, *[1] * (x.dim() - 2)).to(x.device), 0)


def verify_lengths(repeated: RepeatedCall) -> None:
    """Raise VerificationError if the outputs of other rows depend on the longest rows."""
    for at_end in (True, False):
        short = _without_longest(repeated.run, at_end=at_end)
        if short is None:
            continue
        before = repeated.values(short.rest)
        try:
            after = repeated.values(list(range(len(short.rest))), run=short.run)
        except DpshardError:
            return  # the shape of another input depends on the length
        for x, y in zip(before, after, strict=True):
            if not x.is_floating_point():
                continue  # at another size, rounding may decide ties in another way
            if x.dim() == 0 and y.dim() == 0 and _is_masked(repeated.run, short):
                x, y = x[None], y[None]
            elif x.dim() < 1 or len(x) != len(short.rest) or x.dim() != y.dim():
                continue
            if x.dim() > 1 and x.shape[1] == short.long and y.shape[1] == short.length:
                x = short.at_its_positions(x)
            if x.shape != y.shape:
                continue
            x, y = short.content(x), short.content(y)
            if bool((largest_differences(x, y) > tolerance_across_sizes([x], half=repeated.half) * scale(x)).any()):
                raise VerificationError(
                    f"Without its longest rows, which pad this micro-batch from {short.length} to {short.long} "
                    f"positions, the other rows have other outputs. One long sample affects all of them (RoPE scaled "
                    f"by the length: dynamic, longrope; padding without a mask). Pad all micro-batches to one length, "
                    f"or switch the scaling off."
                )


def _sequences(run: Run) -> list[int]:
    found = [
        i
        for i, (x, dim) in enumerate(zip(run.leaves, run.dims, strict=True))
        if dim == 0 and x.dim() == 2 and not x.is_floating_point() and not x.is_complex()
    ]
    return [i for i in found if run.leaves[i].shape[1] == run.leaves[found[0]].shape[1]]


def _padding(run: Run, sequences: list[int], *, at_end: bool) -> Tensor:
    """Return [B]: how many positions at one end have one value in every integer input. 1 counts as 0."""
    inputs = [run.leaves[i][: run.rows] for i in sequences]
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


def _without_longest(run: Run, *, at_end: bool) -> _Shorter | None:
    sequences = _sequences(run)
    if not sequences or run.rows < 2:
        return None
    padding = _padding(run, sequences, at_end=at_end)
    rest = (padding > padding.min()).nonzero()[:, 0].tolist()
    long = run.leaves[sequences[0]].shape[1]
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
    shorter = replace(run, leaves=tuple(kept), batch_size=len(rest), rows=len(rest))
    return _Shorter(shorter, rest, long, length, padding[rest], at_end)


def _is_masked(run: Run, short: _Shorter) -> bool:
    """Return True if an integer input marks padding: a mask by 0, labels by a negative number."""
    found = [run.leaves[i][short.rest] for i in _sequences(run)]
    ends = [x[:, -1 if short.at_end else 0] for x in found]
    shortest = int(short.padding_R.argmax())
    masks = (bool(((x == 0) | (x == 1)).all()) and not bool(end[shortest]) for x, end in zip(found, ends, strict=True))
    return any(masks) or any(bool(end[shortest] < 0) for end in ends)
