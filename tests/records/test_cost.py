"""What clipping costs beyond ordinary training, in numbers that depend on no clock: FLOPs, kept bytes, operations.

The model is a chain of linear maps without biases on [B, T, D], so that every formula can be checked by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard import PrivacyEngine
from dpshard.config import CLIPPING_MODES
from dpshard.records.cost import ghost_flops

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:noise_multiplier=0")

B, T, D, LAYERS = 4, 96, 48, 3
PRODUCT = 2 * B * T * D * D
"""FLOPs of one product of a layer: its output, or the gradient of its input or weight."""
GHOST = B * ghost_flops(T, D, D, torch.device("cpu"), torch.float32)
"""FLOPs of the ghost norm of a layer, without the elementwise product of the Gram matrices."""
WEIGHTED = 2 * B * D * D
"""FLOPs of a clipped sum of existing per-sample gradients."""


class Chain(nn.Sequential):
    """Linear maps; the input has a gradient, so all layers cost the same."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(*(nn.Linear(D, D, bias=False) for _ in range(layers)))


def step(model: nn.Module) -> None:
    x = torch.randn(B, T, D, requires_grad=True)
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def flops(model: nn.Module) -> int:
    step(model)  # the first probes and verifies
    with FlopCounterMode(display=False) as counter:
        step(model)
    return counter.get_total_flops()


def private(mode: str, style: str = "all-layer", layers: int = LAYERS) -> nn.Module:
    model = Chain(layers)
    PrivacyEngine(
        model,
        batch_size=B,
        sample_size=100,
        steps=100,
        noise_multiplier=0.0,
        clipping_mode=mode,
        clipping_style=style,
        verify=False,
    )
    return model


# Kept per-sample gradients make the clipped sum without a product.
NORMS = {
    "per-example": WEIGHTED,
    "bk": GHOST,
    "bk-mixed-ghost": PRODUCT,
    "bk-mixed-opt": WEIGHTED,
    "auto": WEIGHTED,
    "ghost": GHOST,
    "mixed-ghost": PRODUCT,
    "fast-gradient": PRODUCT,
}
"""FLOPs of a layer's norm by mode; at these sizes, per-sample gradients are cheaper than Gram matrices."""


@pytest.mark.parametrize("mode", CLIPPING_MODES)
def test_flops_of_a_mode_are_those_of_its_formula(mode: str) -> None:
    ordinary = flops(Chain())
    assert ordinary == 3 * PRODUCT * LAYERS
    # The first of two passes ends at the first layer, before its input.
    again = PRODUCT * (LAYERS - 1) * (CLIPPING_MODES[mode].backward_passes - 1)
    assert flops(private(mode)) - ordinary == NORMS[mode] * LAYERS + again


@pytest.mark.parametrize("style", ["layer-wise", "param-wise", "block-wise"])
def test_styles_cost_the_same_flops(style: str) -> None:
    assert flops(private("bk", style)) == flops(private("bk"))


class Operations(TorchDispatchMode):
    """Counts operations, about as many as kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one that computes something."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("style", "most"), [("all-layer", 16), ("layer-wise", 32)])
def test_operations_a_layer_stay_few(style: str, most: int) -> None:
    """The cost of one more layer: a model of seven layers less one of three."""

    def count(model: nn.Module) -> int:
        step(model)
        with Operations() as operations:
            step(model)
        return operations.count

    ordinary = (count(Chain(7)) - count(Chain(3))) / 4
    beyond = (count(private("auto", style, 7)) - count(private("auto", style, 3))) / 4 - ordinary
    assert beyond <= most


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes that forward saves for backward, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    step(model)
    x = torch.randn(B, T, D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(x).square().mean()
    loss.backward()
    return sum(storages.values())


@pytest.mark.parametrize("mode", ["auto", "bk"])
def test_the_forward_keeps_nothing_more(mode: str) -> None:
    assert kept_bytes(private(mode)) == kept_bytes(Chain())
