"""Closes the clipping groups of one tape."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpshard.clipping.coefficients import Measured, clip, squared_norms
from dpshard.clipping.group_tape import GroupTape
from dpshard.clipping.scheme import Scheme
from dpshard.clipping.stacks import Stack, Stacks, maker_to_join
from dpshard.clipping.uses import Use


class Closer:
    """The groups of one tape, and the uses that wait until their group closes."""

    def __init__(self, scheme: Scheme, is_padding_B: Tensor | None, loss_scale: float) -> None:
        self._scheme, self._is_padding_B, self._loss_scale = scheme, is_padding_B, loss_scale
        self._scale_B = loss_scale if is_padding_B is None else (~is_padding_B).float() * loss_scale
        # Multiplying by 0 for padding is safe: coefficients are finite.
        self.groups: dict[int, GroupTape] = {}
        self.closed: set[int] = set()
        """Groups whose coefficients are fixed; they take no more records."""
        self._stacks: dict[int, Stacks] = {}
        self._complete: dict[int, dict[int, int]] = {}  # bytes of groups that wait, by anchor
        self._streams: dict[int, set[object]] = {}  # CUDA streams of arrivals, by shared anchor
        self._sums: dict[str, Tensor] = {}
        self._spanning: dict[int, Measured] = {}  # until other ranks' norms arrive

    # --- records arrive

    def joins_others(self, uses: Sequence[Use], tensors: Sequence[Tensor]) -> bool:
        """Let uses wait for others, if they can; return True if they wait ([Note: Uses with equal makers])."""
        scheme = self._scheme
        if not scheme.joining:
            return False
        anchors = scheme.anchors_of([source for use in uses for source in use.sources])
        if len(anchors) > 1 or anchors[0] not in scheme.joining:
            return False
        maker = maker_to_join(uses[0], tensors, scheme.sources, len(uses))
        if maker is None:
            return False
        names: dict[int, list[str]] = {}  # by group
        for use in uses:
            for source in use.sources:
                names.setdefault(scheme.group_of[source.label].index, []).append(source.label)
        for index, some in names.items():
            if not self.groups[index].are_only_uses(some):
                return False
        anchor = anchors[0]
        if anchor not in self._stacks:
            self._stacks[anchor] = Stacks(scheme.group_of)
        stacks = self._stacks[anchor]
        stacks.add(uses, maker, tensors, names)
        for index, some in names.items():
            self.groups[index].arrive_first(some)
        if scheme.shared:
            holding = [index for index in names if self.groups[index].entries or self.groups[index].small]
            if stacks.nbytes > scheme.waiting:
                self._close_complete(scheme.groups_at[anchor], most=0)
            elif holding:
                self._close_complete(holding, most=scheme.complete)
        return True

    def close_complete(self, names: Sequence[str]) -> None:
        """Close the groups of these parameters that have all their records ([Note: Shared anchors])."""
        if self._scheme.shared:
            self._close_complete({self._scheme.group_of[name].index for name in names}, most=self._scheme.complete)

    def _close_complete(self, indices: Collection[int], *, most: int) -> None:
        """Close the complete groups of an anchor once their records exceed `most` bytes."""
        ready: dict[int, list[int]] = {}
        for index in sorted(indices):
            anchor, group = self._scheme.shared.get(index), self.groups.get(index)
            if anchor is not None and group is not None and group.missing == 0 and index not in self.closed:
                ready.setdefault(anchor, []).append(index)
        for anchor, some in ready.items():
            if len(self._streams.get(anchor, ())) > 1:
                continue  # other streams may not have finished; only the anchor waits for all
            waiting = self._complete.pop(anchor, {})
            waiting.update({index: self.groups[index].nbytes if most else 0 for index in some})
            if most and sum(waiting.values()) <= most:
                self._complete[anchor] = waiting
            else:
                self._close_early(anchor, [*waiting])

    def _close_early(self, anchor: int, indices: Sequence[int]) -> None:
        self.closed.update(indices)  # also if this fails: later records would get a norm of their own
        measured = self._measure(indices, self._stacks_of(anchor, indices), keep=True)
        if measured is not None:
            self._clip(measured)
        for index in indices:
            self.groups[index].sum_all()

    def note_streams(self, anchors: Sequence[int]) -> None:
        """Remember the stream of an arrival: kernels on other streams may not have finished."""
        for anchor in anchors:
            if anchor in self._scheme.gpus:
                self._streams.setdefault(anchor, set()).add(torch.cuda.current_stream(self._scheme.gpus[anchor]))

    def group(self, name: str) -> GroupTape:
        """Return the tape of the group of a used parameter."""
        return self.groups[self._scheme.group_of[name].index]

    # --- groups close

    def close(self, anchor: int) -> None:
        """Close the groups of an anchor that have records."""
        stacks = self._stacks_of(anchor, None)
        self._streams.pop(anchor, None)
        self._complete.pop(anchor, None)
        open_groups = (i for i in self._scheme.groups_at[anchor] if i in self.groups and i not in self.closed)
        indices = [i for i in open_groups if self.groups[i].has_arrived]
        self.closed.update(indices)
        measured = self._measure(indices, stacks, keep=True)
        if measured is not None and anchor in self._scheme.withheld:
            self._spanning[indices[0]] = measured
            measured.copy_records(self.groups)
        elif measured is not None:
            self._clip(measured)

    def end_norms(self) -> None:
        """End the first of two passes: fix all coefficients."""
        for index, group in self.groups.items():
            measured = self._measure([index], [], keep=False)
            if measured is not None:
                self._clip(measured)
            group.begin_sums()

    def _measure(self, indices: Sequence[int], stacks: Sequence[Stack], *, keep: bool) -> Measured | None:
        parts, scale_B = self._scheme.roots.parts, self._scale_B
        if parts is not None:
            for index in indices:
                parts.meet(index)
            scale_B = parts.gather_samples(scale_B) if isinstance(scale_B, Tensor) else scale_B
        squares = {m: self.groups[index].squares(keep=keep) for m, index in enumerate(indices)}
        own = {m: parts for m, parts in squares.items() if parts}
        place = {index: m for m, index in enumerate(indices)}
        rows = [[place[index] for index in stack.groups] for stack in stacks]
        stacked = [*zip(rows, [stack.measured(self._scheme.execution) for stack in stacks], strict=True)]
        norm_sq_MB = squared_norms(len(indices), own, stacked)
        return None if norm_sq_MB is None else Measured(indices, [*own], stacks, rows, norm_sq_MB, scale_B)

    def _clip(self, measured: Measured) -> None:
        scheme, indices, own = self._scheme, measured.indices, measured.own
        thresholds = [scheme.groups[index].threshold for index in indices]
        scales = {"loss_scale": self._loss_scale, "scale_B": measured.scale_B}
        clipped = clip(measured.norm_sq_MB, thresholds, scheme.function, **scales)
        for m in own:
            nonfinite_MB = clipped.nonfinite_MB
            self.groups[indices[m]].clip(clipped.sum_weight_MB[m], None if nonfinite_MB is None else nonfinite_MB[m])
        for stack, some in zip(measured.stacks, measured.rows, strict=True):
            self._sums.update(clipped.sums(stack, some))
        norms = clipped.norm_MB.unbind()
        parts = scheme.roots.parts
        for m in sorted({*own}.union(*measured.rows)):
            norm_B = norms[m] if parts is None else parts.select_own(norms[m])
            scheme.sink.observe(scheme.groups[indices[m]], norm_B, self._is_padding_B)

    def _stacks_of(self, anchor: int, indices: Sequence[int] | None) -> list[Stack]:
        """Return the stacks of these groups; record each use outside a stack in its own group."""
        if anchor not in self._stacks:
            return []
        stacks, alone = self._stacks[anchor].take(indices)
        for use, tensors in alone:
            for source, record in use.records(tensors):
                group = self.group(source.label)
                group.add(source.label, source, record)
                group.measure(source.label, keep=True, closing=True)
        return stacks

    # --- groups that span stages

    def own_norm_sq_B(self, index: int) -> Tensor | None:
        """Return this rank's squared norms [B] of a spanning group."""
        return self._spanning[index].norm_sq_MB[0] if index in self._spanning else None

    def clip_spanning(self, index: int, norm_sq_B: Tensor) -> None:
        """Fix a spanning group's coefficients from its squared norms [B] over all ranks."""
        self._clip(replace(self._spanning.pop(index), norm_sq_MB=norm_sq_B[None]))

    def take(self, name: str) -> Tensor | None:
        """Return a parameter's clipped sum, once, and free its records."""
        if name in self._sums:
            return self._sums.pop(name)
        index = self._scheme.group_of[name].index
        return self.groups[index].take(name) if index in self.groups else None
