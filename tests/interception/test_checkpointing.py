"""Selective activation checkpointing, and checkpointing in compiled regions: exact, as without them."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.grids import covering
from tests.networks import PRODUCTS, Network, every_second_product, sentences
from tests.oracle import (
    TOLERANCE,
    Use,
    assert_exact,
    clipped_mean,
    per_sample_gradients,
    private_step,
    randn,
    relative_error,
)
from tests.test_invariance import STYLES

B, R = 6, 30.0
DATA = sentences(B)
PER_SAMPLE = per_sample_gradients(Network(), DATA, F.cross_entropy)


def keeping(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


POLICIES = {
    "products": keeping(list(PRODUCTS)),
    "every second product": every_second_product,
    "everything": keeping(lambda *_, **__: CheckpointPolicy.MUST_SAVE),
    "nothing": keeping([]),
}


def checkpointed(policy):
    model = Network()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, context_fn=POLICIES[policy])
    return model


def assert_step(model, style="all-layer", **options):
    update = private_step(
        model, DATA, F.cross_entropy, max_grad_norm=R, clipping_style=style, **{"verify": False, **options}
    )
    update = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in update.items()}
    expected = clipped_mean(PER_SAMPLE, max_grad_norm=R, batch_size=B, groups=STYLES[style])
    assert relative_error(update, expected) <= TOLERANCE


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_is_exact(policy, style, mode):
    """In one pass and in two; over two micro-batches, of which only the first makes some tensors."""
    assert_step(checkpointed(policy), style, clipping_mode=mode, micro_batch_sizes=[4, 2])


def test_a_verified_model_is_exact():
    assert_step(checkpointed("everything"), verify=True)


def reversed_twice(x):
    order = torch.arange(len(x)).flip(0)
    return x[order][order]


def logged(seen):
    """Return contexts of selective checkpointing that note its operators, in forward and backward."""

    def noting(mode, name):
        class Noting(type(mode)):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is not torch.ops.aten.detach.default:  # which it does not count
                    seen[name].append(str(func))
                return super().__torch_dispatch__(func, types, args, kwargs)

        mode.__class__ = Noting
        return mode

    forward, backward = create_selective_checkpoint_contexts([])
    return noting(forward, "forward"), noting(backward, "backward")


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_recomputation_runs_the_operators_of_its_forward(mode):
    """Also if rows are picked before and within the segment: dpshard's own operators follow them."""
    seen = {"forward": [], "backward": []}

    def use(m, x):
        hidden = m.first(x)
        hidden = hidden + reversed_twice(hidden)  # from here on rows are followed
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return checkpoint(m.segment, hidden, use_reentrant=False, context_fn=functools.partial(logged, seen))

    class Picking(nn.Linear):
        def forward(self, x):
            return super().forward(reversed_twice(x))

    segment = nn.Sequential(nn.LayerNorm(4), Picking(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = Use(use, first=nn.Linear(4, 4), segment=segment).double()
    private_step(model, (randn(B, 3, 4),), verify=False, clipping_mode=mode, max_grad_norm=1.0)
    passes = 2 if mode == "ghost" else 1
    forward = seen["forward"][-len(seen["backward"]) // passes :]  # the last one; probes came before
    assert len(forward) > 10
    assert seen["backward"] == forward * passes


def test_what_is_written_in_place_after_a_parameter():
    """The convolution's output is not kept, so a function may write into it."""

    def use(m, x):
        return checkpoint(m.body, x, use_reentrant=False, context_fn=POLICIES["products"])

    body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2))
    assert_exact(Use(use, before=5, body=body), randn(B, 2, 5, 5), modes=["auto", "ghost"])


def in_a_function(m, x):
    return checkpoint(lambda h: m.linear(h).sin() * m.scale, x, use_reentrant=False)


def nested(m, x):
    def inner(h):
        return F.linear(h * m.scale, m.linear.weight)

    def outer(h):
        return checkpoint(inner, h + m.scale, use_reentrant=False) * m.scale

    return checkpoint(outer, x, use_reentrant=False)


@pytest.mark.parametrize("use", [in_a_function, nested])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_checkpointed_function_may_use_parameters_itself(use, compiled):
    """No call of a module enters the mode when it is repeated."""
    model = Use(use, before=5, linear=nn.Linear(5, 5), scale=nn.Parameter(torch.rand(5)))
    if compiled:
        model.linear.compile(backend="aot_eager")
    assert_exact(model, randn(B, 3, 5), modes=["auto", "ghost"])


# --- compiled -------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5), nn.Parameter(torch.rand(5))

    def forward(self, x):
        return x + self.linear(torch.tanh(x)) * (1 + self.scale)


class Small(nn.Module):
    """Quick to compile: a linear map and a derived parameter, twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Gate(), Gate()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def around_each_block(model, context, backend):
    """The checkpoint is around the block, the compiled call around the checkpoint: torchtitan's order."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, **context)
        model.blocks[i].compile(fullgraph=True, backend=backend)
    return model


def within_each_checkpoint(model, context, backend):
    for i, block in enumerate(model.blocks):
        block.compile(fullgraph=True, backend=backend)
        model.blocks[i] = checkpoint_wrapper(block, **context)
    return model


def around_the_model(model, context, backend):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, **context)
    model.compile(fullgraph=True, backend=backend)
    return model


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("way", "selective", "style"),
    covering(
        [
            (around_each_block, False, "all-layer"),
            (around_each_block, True, "layer-wise"),
            (within_each_checkpoint, True, "all-layer"),
            (around_the_model, True, "all-layer"),
        ],
        lambda way, selective, style: {way} & {around_each_block, within_each_checkpoint},
    ),
)
def test_compiled_and_checkpointed(way, selective, style):
    """In either order; the compiler's setting for this is restored."""
    torch.manual_seed(0)
    context = {"context_fn": every_second_product} if selective else {}
    model, x = Small().double(), randn(4, 3, 5)
    layers = [["scale"], ["linear.weight", "linear.bias"]]
    groups = [[f"blocks.{i}.{name}" for name in layer] for i in range(2) for layer in layers]
    groups = groups if style == "layer-wise" else [[*itertools.chain(*groups)]]
    expected = clipped_mean(per_sample_gradients(model, (x,)), max_grad_norm=0.5, batch_size=4, groups=groups)
    options = {"max_grad_norm": 0.5, "verify": False, "clipping_style": style, "micro_batch_sizes": [2, 2]}
    update = private_step(way(model, context, "aot_eager"), (x,), **options)
    update = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in update.items()}
    assert relative_error(update, expected) <= TOLERANCE
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
