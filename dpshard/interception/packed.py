"""Packed rows: rules treat every token as a row, and the tape sums the tokens of each unit.

A token is a sample with one position: [R, T, ...] becomes [N, 1, ...], and the output goes back. Only the shape of a
tensor shows where its tokens are. So verification/packed.py always compares units with each unit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.errors import BatchLayoutError
from dpshard.interception.run import Run
from dpshard.rules.torch_functions import Function, function_name
from dpshard.sampling import PackedTokens

NOT_BY_TOKEN = (
    "on packed rows, an argument or its output has no row for each token ([R, T, ...], [T, R, ...] or [R * T, ...]), "
    "so the unit of its rows is unknown. Only functions that treat each token separately may use parameters there "
    "(linear maps, embeddings, norms, elementwise functions). A table of positions is one if the model gets "
    "position_ids [R, T]"
)


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """R rows of T tokens each."""

    rows: int
    tokens: int

    def place(self, x: Tensor) -> str | None:
        """Return "rt" for [R, T, ...], "tr" for [T, R, ...], "n" for [R * T, ...]; else None."""
        R, T = self.rows, self.tokens
        if x.dim() > 1 and x.shape[0] == R and x.shape[1] == T:
            return "rt"
        if x.dim() > 1 and x.shape[0] == T and x.shape[1] == R:
            return "tr"
        return "n" if x.dim() > 0 and x.shape[0] == R * T else None

    def by_token(self, x: Tensor, place: str) -> Tensor:
        """Return `x` with a row per token: [N, 1, ...], or [N, ...] unchanged."""
        if place == "n":
            return x
        if place == "tr":
            x = x.transpose(0, 1)
        return x.reshape(self.rows * self.tokens, 1, *x.shape[2:])

    def back(self, x: Tensor, place: str) -> Tensor | None:
        """Undo `by_token`; None if `x` has no row per token."""
        N = self.rows * self.tokens
        if place == "n":
            return x if x.dim() > 0 and x.shape[0] == N else None
        if x.dim() < 2 or x.shape[0] != N or x.shape[1] != 1:
            return None
        x = x.reshape(self.rows, self.tokens, *x.shape[2:])
        return x.transpose(0, 1) if place == "tr" else x


def replaced(x: Any, old: Sequence[Tensor], new: Sequence[Any]) -> Any:
    """Return a structure with `old` tensors replaced by `new` ones. Written so that dynamo can trace it."""
    if isinstance(x, Tensor):
        for before, after in zip(old, new, strict=True):
            if before is x:
                return after
        return x
    if isinstance(x, dict):
        return {name: replaced(item, old, new) for name, item in x.items()}
    if type(x) in (tuple, list):
        items = [replaced(item, old, new) for item in x]
        return tuple(items) if type(x) is tuple else items
    return x


def writes_in_place(func: Function) -> bool:
    """Return True if `func` changes its first argument."""
    name = function_name(func)
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


class Role(Enum):
    """The meaning of an input with a value per token."""

    CONTENTS = auto()
    POSITIONS = auto()  # increase by 1 within every unit
    UNITS = auto()  # one number per unit, different for each
    MASK = auto()  # one number per unit


@dataclass(frozen=True, slots=True)
class PackedRun(Run):
    """A call on packed rows; its samples are units."""

    packed: PackedTokens = None  # type: ignore[assignment]

    def on(self, samples: list[int]) -> Any:
        """Return the output for one unit alone, at its own positions; without `samples`, for the whole stream."""
        leaves = tuple(self.alone(x, samples[0]) for x in self.leaves) if samples else self.leaves
        args, kwargs = pytree.tree_unflatten([self._copied(x) for x in leaves], self.tree)
        return self.original(*args, **kwargs)

    def carrying(self) -> list[tuple[Tensor, int]]:
        """Return nothing: no input has a dimension of units."""
        return []

    def alone(self, x: Any, unit: int) -> Any:
        """Return a unit's part of an input: [1, L, ...], or [L, ...] of flat tokens."""
        row, start, end = self.packed.places[unit]
        R, T = self.packed.shape
        if is_block_mask(x) and x.shape[-2:] == (T, T):
            return _block_mask_of(x, row, start, end)
        if not isinstance(x, Tensor):
            return x
        with torch._C.DisableTorchFunction():
            if x.shape == (T, T) and R == 1:
                return x[start:end, start:end]
            if x.dim() > 2 and x.shape[-2:] == (T, T) and x.shape[0] in (1, R):  # a mask [R, ..., T, T]
                return x[row if x.shape[0] == R else 0, ..., start:end, start:end].unsqueeze(0)
            if is_boundaries(x, R * T):
                return torch.tensor([0, end - start], dtype=x.dtype, device=x.device)
            if x.dim() > 1 and x.shape[:2] == (R, T):
                part = x[row : row + 1, start:end]
            elif x.dim() > 0 and x.shape[0] == R * T:
                part = x[row * T + start : row * T + end]
            else:
                return x
            if self.role(x) is Role.UNITS:  # models may use unit numbers only to compare them
                first, start, _ = next(iter(self.packed.places.values()))
                part = torch.full_like(part, int(x.reshape(R, T)[first, start]))
            return part

    def with_contents(self, units: list[int], change: Any) -> PackedRun:
        """Return the call with contents of some units changed by `change(x, tokens)`."""
        leaves = list(self.leaves)
        for i in self.contents():
            x, T = leaves[i].detach(), self.packed.shape[1]
            before_N = x.flatten(0, 1) if x.shape[:2] == self.packed.shape else x
            after_N = before_N.clone()
            for row, start, end in (self.packed.places[unit] for unit in units):
                tokens = slice(row * T + start, row * T + end)
                after_N[tokens] = change(before_N[tokens], before_N)
            leaves[i] = after_N.view(x.shape)
        return replace(self, leaves=tuple(leaves))

    def contents(self) -> list[int]:
        """Return the indices of inputs with a value per token that are neither positions, unit numbers nor a mask."""
        R, T = self.packed.shape
        found = []
        for i, x in enumerate(self.leaves):
            if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-2:] == (T, T) or is_boundaries(x, R * T):
                continue
            by_token = x.shape[:2] == (R, T) or x.shape[0] == R * T
            if by_token and self.role(x) is Role.CONTENTS:
                found.append(i)
        return found

    def _parts(self, x: Tensor) -> list[Tensor] | None:
        R, T = self.packed.shape
        if x.is_floating_point() or x.is_complex() or tuple(x.shape) not in ((R, T), (R * T,)):
            return None
        x_RT = x.detach().reshape(R, T).cpu().long()
        return [x_RT[row, start:end] for row, start, end in self.packed.places.values()]

    def role(self, x: Any) -> Role:
        """Return the role of an input."""
        parts = self._parts(x) if isinstance(x, Tensor) else None
        if parts is None:
            return Role.CONTENTS
        if max(map(len, parts)) > 2 and all(bool((part.diff() == 1).all()) for part in parts):
            return Role.POSITIONS
        if not all(bool((part == part[0]).all()) for part in parts):
            return Role.CONTENTS
        return Role.UNITS if len({int(part[0]) for part in parts}) == len(parts) > 1 else Role.MASK

    def refuse_absolute_positions(self) -> None:
        """Raise BatchLayoutError if positions show where in its row a unit lies."""
        for x in self.leaves:
            if self.role(x) is Role.POSITIONS and len({int(part[0]) for part in self._parts(x) or ()}) > 1:
                raise BatchLayoutError(
                    f"{type(self.module).__name__} gets positions that do not restart in every unit, so a unit's "
                    f"gradient depends on the units before it. Pass position_ids that begin at 0 in each unit, as "
                    f"dpshard.Packing makes them."
                )

    @staticmethod
    def _copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with torch._C.DisableTorchFunction():
            return x.detach().clone()


def is_block_mask(x: Any) -> bool:
    """Return True for flex_attention's BlockMask."""
    return type(x).__name__ == "BlockMask"


def _block_mask_of(mask: Any, row: int, start: int, end: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask  # slow to import

    whole = mask.mask_mod

    def of_unit(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return whole(b + row, h, q + start, kv + start)

    device = mask.kv_num_blocks.device
    return create_block_mask(of_unit, 1, mask.shape[1], end - start, end - start, device=device)


def is_boundaries(x: Tensor, tokens: int) -> bool:
    """Return True for cumulative lengths: whole numbers that grow from 0 to `tokens` at most."""
    if x.dim() != 1 or len(x) < 2 or x.is_floating_point() or x.dtype == torch.bool:
        return False
    return int(x[0]) == 0 and int(x[-1]) <= tokens and bool((x.diff() >= 0).all()) and int(x[-1]) > 0


def plan_packed_run(module: nn.Module, original: Any, args: Any, kwargs: Any, packed: PackedTokens) -> PackedRun:
    """Return the call on packed rows."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    R, T = packed.shape
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not any(x.dim() > 0 and (x.shape[:2] == (R, T) or x.shape[0] == R * T) for x in tensors):
        raise BatchLayoutError(
            f"The units were given for rows {(R, T)}, but no input of {type(module).__name__} has these rows of tokens "
            f"(shapes {[tuple(x.shape) for x in tensors]}). Pass all rows of the micro-batch to the model."
        )
    _refuse_other_order(module, tensors, packed)
    rows = max(1, int((~packed.is_padding).sum()) if packed.everywhere is None else packed.everywhere)
    given, dims = tuple(leaves), (None,) * len(leaves)
    return PackedRun(module, original, given, given, tree, R * T, dims, rows, packed=packed, grid=TokenGrid(R, T))


def _refuse_other_order(module: nn.Module, tensors: list[Tensor], packed: PackedTokens) -> None:
    with torch._C.DisableTorchFunction():
        for x in tensors:
            if x.shape != packed.unit_ids.shape or x.is_floating_point() or len(x) < 2:
                continue
            for given in packed.given:
                given = given.to(x.device)
                if torch.equal(x, given):
                    break
                rows = [set(map(tuple, y.tolist())) for y in (x, given)]
                if rows[0] == rows[1] and len(rows[0]) > 1:
                    raise BatchLayoutError(
                        f"{type(module).__name__} got rows that engine.batches handed out, in another order, so their "
                        f"tokens would count for other units. Keep the order of the rows."
                    )
