"""Formulas for floating-point operations by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import dpshard.kernels.flops  # noqa: F401

_aten = torch.ops.aten


def _convolution_backward(gradient: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Count each gradient as the convolution; torch counts the weight's once per group."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, mask = args
    return (mask[0] + mask[1]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed)


# torch's registry lacks its CPU kernel.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g.shape, q.shape, k.shape, v.shape
    ),
}


class FlopMeter(TorchDispatchMode):
    """Counts operations, without the hooks of FlopCounterMode."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result
