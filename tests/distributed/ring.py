"""torch's ring attention on CPUs, for tests: torch 2.13 dispatches its context_parallel for operators of GPUs alone.

The operator of CPUs gets the handler that those of GPUs have; rotations, merging and load balancing are torch's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

_SEQUENCE = 2
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(_: Any, args: Any, kwargs: Any) -> Any:
    mesh, (q, k, v, dropout_p, is_causal) = args[0].device_mesh, args
    found = torch_cp._templated_ring_attention(
        mesh.get_group(), _SEQUENCE, _FORWARD, *(x.to_local() for x in (q, k, v)), is_causal=is_causal,
        dropout_p=dropout_p, scale=kwargs.get("scale"),
    )  # fmt: skip
    return tuple(_placed(x, mesh) for x in found)


def _backward(_: Any, args: Any, kwargs: Any) -> Any:
    mesh, (g, q, k, v, out, logsumexp, dropout_p, is_causal) = args[0].device_mesh, args
    found = torch_cp._templated_ring_attention_backward(
        mesh.get_group(), _SEQUENCE, _BACKWARD, g.to_local(), "grad_out",
        *(x.to_local() for x in (q, k, v, out, logsumexp)), is_causal=is_causal, dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )  # fmt: skip
    return tuple(_placed(x, mesh) for x in found)


def _placed(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(_SEQUENCE)], run_check=False)


HANDLERS: Any = {_FORWARD: _forward, _BACKWARD: _backward}


@contextmanager
def ring(group: Any, *xs: Tensor) -> Iterator[None]:
    """Cut `xs` [B, T, ...] over `group`, balanced for causal attention, in a block with torch's ring attention."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with (
        mock.patch.object(torch_cp, "custom_ops", torch_cp.custom_ops | HANDLERS),
        mock.patch.object(torch_cp._cp_options, "convert_to_f32", False),
        context_parallel(mesh, buffers=[*xs], buffer_seq_dims=[1] * len(xs)),
    ):
        yield
