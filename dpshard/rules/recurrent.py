"""Recurrent layers and cells, as compositions of functions with rules, because `torch.lstm` hides its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpshard.rules.registry import composite

State = tuple[Tensor, ...]
"""State of a cell: h, and for an LSTM also c, each [B, H]."""
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]
"""Function of (x W_ih^T + b_ih, state, W_hh, b_hh) that returns the next state."""


def _lstm(gates_x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    h, c = state
    i, f, g, o = (gates_x + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(gates_x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    (h,) = state
    (r_x, z_x, n_x), (r_h, z_h, n_h) = gates_x.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return (n + (z_x + z_h).sigmoid() * (h - n),)


def _rnn_tanh(gates_x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates_x + F.linear(state[0], w_hh, b_hh)).tanh(),)


def _rnn_relu(gates_x: Tensor, state: State, w_hh: Tensor, b_hh: Tensor | None) -> State:
    return ((gates_x + F.linear(state[0], w_hh, b_hh)).relu(),)


CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}


def _run(
    cell: Cell, steps: Sequence[Tensor], state: State, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None
) -> tuple[list[Tensor], State]:
    """Return the outputs of all steps, and the last states.

    In packed sequences, the last rows end first. Backward in time, they begin later, from their rows of `state`.
    """
    start, outputs, ended = state, [], []
    state = tuple(part[: len(steps[0])] for part in state)
    for gates_x in steps:
        rows, before = len(gates_x), len(state[0])
        if rows > before:
            state = tuple(torch.cat([x, first[before:rows]]) for x, first in zip(state, start, strict=True))
        elif rows < before:
            ended.append(tuple(x[rows:] for x in state))
            state = tuple(x[:rows] for x in state)
        state = cell(gates_x, state, w_hh, b_hh)
        if w_hr is not None:  # an LSTM with projections
            state = (F.linear(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    return outputs, tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True)) if ended else state


def _layers(
    cell: Cell,
    x: Tensor,
    sizes: list[int] | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return outputs, and last states [L, B, H], for x [T, B, D] or packed rows [sum(sizes), D]."""
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[State] = []
    begun = [state.unbind() if sizes is None else _packed(state, x[: sizes[0]]) for state in states]
    starts = list(zip(*begun, strict=True))
    for layer in range(num_layers):
        if layer > 0 and train:
            x = F.dropout(x, dropout, True)
        outputs = []
        for direction in range(directions):
            place = len(last)
            w_ih, w_hh, *more = weights[place * each : (place + 1) * each]
            b_ih, b_hh = more[:2] if biased else (None, None)
            gates_x = F.linear(x, w_ih, b_ih)
            steps = gates_x.unbind() if sizes is None else gates_x.split(sizes)
            taken = steps[::-1] if direction else steps
            found, end = _run(cell, taken, starts[place], w_hh, b_hh, more[-1] if len(more) % 2 else None)
            found = found[::-1] if direction else found
            outputs.append(torch.stack(found) if sizes is None else torch.cat(found))
            last.append(end)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (x, *((torch.stack if sizes is None else _padded)(parts) for parts in zip(*last, strict=True)))


def _packed(state: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the L states [B, H] of `state` [L, B, H].

    They are packed as B sequences of length L, so that routing follows the samples of their rows. `rows` [B, D] carry
    samples, and new zeros would not.
    """
    if not state.requires_grad and not state.any():
        return tuple(torch.zeros_like(rows[:, :1]) + zeros[:1] for zeros in state)
    packed, _ = torch._pack_padded_sequence(state, torch.full((len(rows),), len(state), device="cpu"), False)
    return packed.split(len(rows))


def _padded(states: Sequence[Tensor]) -> Tensor:
    sizes = torch.full((len(states),), len(states[0]), device="cpu")
    return torch._pad_packed_sequence(torch.cat(list(states)), sizes, False, 0.0, len(states))[0]


def _layer_of(cell: Cell) -> Callable[..., tuple[Tensor, ...]]:
    def layer(x: Tensor, second: Any, third: Any, fourth: Any, *options: Any) -> tuple[Tensor, ...]:
        if isinstance(fourth, (tuple, list)):  # a packed sequence
            states = (third,) if isinstance(third, Tensor) else third
            biased, num_layers, dropout, train, bidirectional = options
            return _layers(cell, x, second.tolist(), states, fourth, biased, num_layers, dropout, train, bidirectional)
        states = (second,) if isinstance(second, Tensor) else second
        num_layers, dropout, train, bidirectional, batch_first = options
        x = x.transpose(0, 1) if batch_first else x
        y, *last = _layers(cell, x, None, states, third, fourth, num_layers, dropout, train, bidirectional)
        return (y.transpose(0, 1) if batch_first else y, *last)

    return layer


def _cell_of(cell: Cell) -> Callable[..., Any]:
    def step(
        x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        found = cell(F.linear(x, w_ih, b_ih), (state,) if isinstance(state, Tensor) else tuple(state), w_hh, b_hh)
        return found[0] if isinstance(state, Tensor) else found

    return step


for name, cell in CELLS.items():
    composite(getattr(torch, name))(_layer_of(cell))
    composite(getattr(torch, f"{name}_cell"))(_cell_of(cell))
