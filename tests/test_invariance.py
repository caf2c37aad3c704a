"""What decides time and memory, and how the samples come, does not decide the update.

Failure modes: 1 test_micro_batches (expected batch size 5, realised 6); 2 test_clipping; 3 test_loss_reduction,
test_micro_batches; 5 test_padded_micro_batches; 7 (tied weights, loops, crossing groups) test_clipping;
10 test_autocast, test_sums_of_half_precision_parameters_accumulate_in_float32.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpshard.config import CLIPPING_MODES
from dpshard.errors import UnsupportedParameterError
from tests.networks import Network, sentences
from tests.oracle import (
    TOLERANCE,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    norm,
    per_sample_gradients,
    private_step,
    ramp_loss,
    relative_error,
)

B, R = 6, 30.0
DATA = sentences(B)
PER_SAMPLE = per_sample_gradients(Network(), DATA, F.cross_entropy)
NAMES = list(PER_SAMPLE[0])


def expected(**options):
    return clipped_mean(PER_SAMPLE, **{"max_grad_norm": R, "batch_size": B, **options})


def assert_update(update, tolerance=TOLERANCE, **options):
    assert relative_error(update, expected(**options)) <= tolerance


def step(model=None, loss=F.cross_entropy, **options):
    return private_step(model or Network(), DATA, loss, **{"max_grad_norm": R, "verify": False, **options})


def by(label):
    groups = {}
    for name in NAMES:
        groups.setdefault(label(name), []).append(name)
    return list(groups.values())


HALVES = [NAMES[::2], NAMES[1::2]]
STYLES = {
    "all-layer": [NAMES],
    "layer-wise": by(lambda name: name.rpartition(".")[0]),
    "block-wise": by(lambda name: name[: len("blocks.0.")] if name.startswith("blocks.") else "rest"),
    "param-wise": [[name] for name in NAMES],
    "lists": HALVES,
}


def test_samples_are_clipped_and_unclipped():
    """The tests of this file would prove little if all samples were clipped, or none."""
    norms = [norm(g) for g in PER_SAMPLE]
    assert min(norms) < R < max(norms)


@pytest.mark.parametrize("clipping_fn", ["abadi", "automatic", "global"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", CLIPPING_MODES)
def test_clipping(mode, style, clipping_fn):
    update = step(clipping_mode=mode, clipping_style=HALVES if style == "lists" else style, clipping_fn=clipping_fn)
    assert_update(update, groups=STYLES[style], clipping_fn=clipping_fn)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [[6], [1, 5]])
def test_loss_reduction(reduction, mode, sizes):
    def loss(output, y):
        return F.cross_entropy(output, y, reduction=reduction)

    assert_update(step(loss=loss, loss_reduction=reduction, clipping_mode=mode, micro_batch_sizes=sizes))


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("sizes", [[6], [3, 3], [1] * 6, [1, 2, 3], [5, 1]], ids=str)
def test_micro_batches(sizes, style, mode):
    update = step(micro_batch_sizes=sizes, batch_size=5, clipping_style=style, clipping_mode=mode)
    assert_update(update, batch_size=5, groups=STYLES[style])


def test_the_order_of_samples():
    order = [4, 1, 5, 0, 3, 2]
    data = [rows[order] for rows in DATA]
    update = private_step(Network(), data, F.cross_entropy, micro_batch_sizes=[2, 4], max_grad_norm=R, verify=False)
    assert_update(update)


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_two_forwards_before_one_backward(mode):
    model, (ids, y) = Network(), DATA
    engine = noise_free_engine(model, batch_size=B, max_grad_norm=R, clipping_mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = [F.cross_entropy(model(ids[part]), y[part]) for part in (slice(0, 2), slice(2, 6))]
    sum(losses).backward()
    optimizer.step()
    assert_update(gradients_of(model))
    engine.detach()


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 6, 8])
def test_padded_micro_batches(micro_batch_size, mode):
    """All 6 samples are drawn, with probability 1; the last micro-batch is padded."""
    model = Network()
    engine = noise_free_engine(
        model, batch_size=B, sample_size=B, target_delta=1e-3, max_grad_norm=R, clipping_mode=mode
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in engine.batches(torch.utils.data.TensorDataset(*DATA), micro_batch_size):
        for ids, y in batch:
            F.cross_entropy(model(ids), y).backward()
        optimizer.step()
    assert_update(gradients_of(model))
    engine.detach()


@pytest.mark.parametrize("mode", CLIPPING_MODES)
@pytest.mark.parametrize("style", ["all-layer", "block-wise", "param-wise"])
def test_activation_checkpointing(style, mode):
    update = step(Network(reentrant=False), clipping_style=style, clipping_mode=mode, micro_batch_sizes=[4, 2])
    assert_update(update, groups=STYLES[style])


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
def test_checkpointing_of_what_meets_the_data_first(mode):
    """Its input has no gradient: a repetition must save as many tensors as the first run."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.inner, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def begin(self, ids):
            return self.inner(torch.tanh(self.embedding(ids)))

        def forward(self, ids):
            hidden = checkpoint(self.begin, ids, use_reentrant=False) if self.training else self.begin(ids)
            return self.head(torch.tanh(hidden).sum(1))

    model, ids = First().double(), torch.randint(7, (6, 4))
    expected = clipped_mean(per_sample_gradients(copy.deepcopy(model).eval(), [ids]), max_grad_norm=0.1, batch_size=6)
    engine = noise_free_engine(model, batch_size=6, max_grad_norm=0.1, clipping_mode=mode)
    ramp_loss(model(ids)).backward()
    engine.privatize()
    assert relative_error(gradients_of(model), expected) < 1e-12


# Some of its steps see no gradients, and torch's warning does not matter here.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_reentrant_checkpointing_is_refused(mode, verify):
    with pytest.raises(UnsupportedParameterError, match="use_reentrant=False"):
        step(Network(reentrant=True), clipping_mode=mode, verify=verify)


@pytest.mark.parametrize("mode", ["auto", "bk", "ghost", "per-example"])
def test_autocast(mode):
    """Within the rounding of bfloat16 the update is that of each sample alone under autocast."""
    model = Network().float()

    def call(ids):
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids)

    def loss(output, y):
        return F.cross_entropy(output.float(), y)

    alone = []
    for i in range(B):
        value = loss(call(DATA[0][i : i + 1]), DATA[1][i : i + 1])
        alone.append(dict(zip(NAMES, torch.autograd.grad(value, list(model.parameters())), strict=True)))
    update = private_step(model, DATA, loss, call=call, clipping_mode=mode, max_grad_norm=R)
    assert all(g.dtype == torch.float32 for g in update.values())
    assert relative_error(update, clipped_mean(alone, max_grad_norm=R, batch_size=B)) < 2e-2


def test_norms_under_autocast_are_float32():
    """|x g| of a long sequence: a Gram matrix or a sum in bfloat16 would be wrong in the third digit."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    x = torch.randn(2, 512, 8).bfloat16().float()

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def loss(output):
        return (output.float() * torch.linspace(-1, 1, 8).bfloat16()).sum((1, 2)).mean()

    # The output gradient is a bfloat16 constant, so only dpshard's computations round.
    g = torch.linspace(-1, 1, 8).bfloat16().double()
    exact = [{"weight": torch.outer(g, x[i].double().sum(0)), "bias": 512 * g} for i in range(2)]
    for mode in CLIPPING_MODES:
        update = private_step(model, (x,), loss, call=call, clipping_mode=mode, max_grad_norm=1.0)
        assert relative_error(update, clipped_mean(exact, max_grad_norm=1.0, batch_size=2)) < 1e-5


def test_sums_of_half_precision_parameters_accumulate_in_float32():
    """600 gradients of 1: a sum in bfloat16 would stop at 256."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, x):
            return x * self.w

    update = private_step(
        Scale(), (torch.ones(600, 1, dtype=torch.bfloat16),), lambda y: y.mean(), micro_batch_sizes=[1] * 600
    )
    assert update["w"].dtype == torch.bfloat16
    assert float(update["w"]) == 1.0
