"""Calls on rows picked by the data."""

from __future__ import annotations

from dataclasses import replace

import torch

from dpshard.interception.call import InterceptedCall
from dpshard.interception.routing import Routing
from dpshard.rules import RULES

_LOST = (
    "the data picked the rows of its input in a way that cannot be followed (a mask, nonzero or unique, and then a "
    "function that mixes rows; a packed sequence that pack_padded_sequence did not make from a tensor with a row per "
    "sample, or that was padded without restoring its order), so the sample of each row is unknown. Keep all rows, "
    "[B, T, ...], and mask the outputs or the loss"
)
_ROUTED = (
    "the data picked the rows of its input, as for experts, and {}. Routed rows may pass through functions that treat "
    "each row separately (linear maps, convolutions, norms, attention within a row, elementwise functions) and grouped "
    "products. Before any other function keep all rows, [B, T, ...], and add a row only to rows of its own sample"
)
_COMPILED = _ROUTED.format("torch.compile would fix their number, so leave it uncompiled")
_SIDE_BY_SIDE = _ROUTED.format("its inputs hold rows of different samples side by side")
_AWAY = (
    "experts on several ranks meet rows of the samples of all of them, and other parameters those of the rank's own "
    "samples. Send rows to the experts' ranks by all_to_all_single of torch.distributed._functional_collectives, "
    "uncompiled, and send them back before other parameters use them"
)
ONE_BY_ONE = _ROUTED.format("this function is not known to treat them one by one")


def with_routed_rows(call: InterceptedCall, routing: Routing) -> InterceptedCall:
    """Return `call` with the sample of every row if rows are out of order, else unchanged."""
    if call.layout.routed and (call.slots.compiled or torch.compiler.is_compiling()):
        raise call.refuse(_COMPILED)
    data = [x for x in call.tensors if x not in call.sources]
    if call.layout.lost or any(routing.lost(x) for x in data):
        raise call.refuse(_LOST, advise=False)
    routed = [x for x in data if routing.samples(x) is not None]
    expected = [x for x, axis in zip(call.tensors, call.layout.inputs, strict=True) if axis and axis.routed]
    if not routed and not expected:
        return call
    sample_N = routing.agreed(routed) if routed else None
    if sample_N is None or any(all(x is not y for y in routed) for x in expected):
        raise call.refuse(_SIDE_BY_SIDE, advise=False)
    none_here = call.exchange is not None and len(sample_N) == 0
    if routing.in_order(sample_N) and call.func in RULES and not none_here:
        return replace(call, layout=call.layout.in_order())
    if call.output_axis is None or not call.output_axis.routed:
        raise call.refuse(ONE_BY_ONE, advise=False)
    return replace(call, samples=sample_N)


def with_places(call: InterceptedCall) -> InterceptedCall:
    """Return `call` with the numbers that the samples have in its records.

    Refuses experts that get rows of this rank without an exchange, and other parameters that get rows of other ranks.
    """
    exchange = call.exchange
    if exchange is None or not exchange.of_samples:
        return call
    places = exchange.sample_numbers(call.samples, call.slots.batch_size, call.roots)
    if places is None and (call.samples is not None or exchange.sample_count(1, call.roots) > 1):
        raise call.refuse(_AWAY, advise=False)
    return replace(call, samples=places)
