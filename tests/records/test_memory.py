"""Memory of per-sample gradients: reused one after the other, never at the same time, and freed after backward."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from dpshard.records import OuterProduct, memory
from tests.engine.script import UNWARNED, engine_on

pytestmark = UNWARNED

SHAPE = (4, 8, 16)


class Within(torch.autograd.Function):
    """Runs a function within backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


def within_backward(function):
    Within.apply(torch.ones(1, requires_grad=True), function).sum().backward()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return memory.empty(shape or SHAPE, torch.ones(1), dtype)


def test_memory_serves_again_when_nothing_refers_to_it():
    def use():
        first = empty()
        address = first.data_ptr()
        view = first[1:].flatten()  # equivalent to the tensor itself
        del first
        assert empty().data_ptr() != address
        del view
        second = empty(4, 8, 8, dtype=torch.float64)
        assert second.shape == (4, 8, 8)
        assert second.dtype == torch.float64
        address = second.data_ptr()
        del second
        assert empty(300).data_ptr() == address

    within_backward(use)


def test_tensors_that_live_at_once_never_share_memory():
    def use():
        kept = [empty().fill_(i) for i in range(5)]
        kept[2] = empty().fill_(7)  # its memory was not handed out last
        del kept[-1]
        kept.append(empty().fill_(8))
        assert [x.unique().item() for x in kept] == [0, 1, 7, 3, 8]

    within_backward(use)


def test_a_small_gradient_that_is_kept_does_not_keep_a_large_buffer():
    def use():
        del_me = empty(1000)
        address = del_me.data_ptr()
        del del_me
        small = empty(10)
        assert small.untyped_storage().nbytes() <= 2 * small.nbytes
        assert empty(900).data_ptr() == address

    within_backward(use)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_when_backward_is_through(fails):
    held = []

    def use():
        held.append(weakref.ref(empty().untyped_storage()))
        assert memory._held.buffer is not None
        if fails:
            raise ValueError("on the way")

    if fails:
        with pytest.raises(ValueError, match="on the way"):
            within_backward(use)
        within_backward(lambda: empty(1))  # the next backward frees the leftovers of a failed one
    else:
        within_backward(use)
    gc.collect()
    assert memory._held.buffer is None
    assert held[0]() is None


def test_outside_of_backward_and_with_other_kinds_of_tensors_memory_is_fresh():
    assert empty().shape == SHAPE
    assert memory._held.buffer is None

    def use():
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.ones(1))
            assert type(memory.empty(SHAPE, fake, torch.float32)) is type(fake)
        assert memory.empty(SHAPE, torch.ones(1, device="meta"), torch.float32).is_meta
        assert memory._held.buffer is None

    within_backward(use)


def test_gradients_of_products_share_memory_one_after_the_other():
    def use():
        torch.manual_seed(0)
        addresses = set()
        for _ in range(3):
            rows, cols = torch.randn(4, 1, 5, 8), torch.randn(4, 1, 5, 16)
            gradient, norm_sq = OuterProduct(rows, cols, torch.Size((8, 16))).instantiated()
            expected = torch.einsum("bgtr,bgtc->brc", rows, cols)
            torch.testing.assert_close(gradient, expected)
            torch.testing.assert_close(norm_sq, expected.square().sum((1, 2)))
            addresses.add(gradient.data_ptr())
            del gradient
        assert len(addresses) == 1

    within_backward(use)


@pytest.mark.parametrize(("style", "buffers"), [("layer-wise", 1), ("all-layer", 4)])
def test_layers_fill_the_same_memory_if_they_are_clipped_one_by_one(style, buffers, monkeypatch):
    allocate, addresses = memory.empty, []

    def recorded(*args):
        gradient = allocate(*args)
        addresses.append(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(memory, "empty", recorded)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    engine_on(model, clipping_style=style, clipping_mode="per-example", verify=False)
    model(torch.randn(6, 64, 64)).square().mean((1, 2)).mean().backward()
    assert len(addresses) == 4
    assert len(set(addresses)) == buffers
