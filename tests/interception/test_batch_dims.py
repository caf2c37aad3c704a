"""Which dimension carries the samples is never guessed: evidence, or an error.

Failure mode: 12 (a batch dimension that shapes alone suggest).
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpshard.errors import BatchLayoutError, VerificationError
from tests.oracle import (
    assert_exact,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    per_sample_gradients,
    private_step,
    ramp_loss,
    randn,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")

B, T, D = 4, 6, 3


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


class Switched(nn.Module):
    """The same map of [B, T, D], done on [T, B, D] if it is told to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D).double()

    def forward(self, x, layout="samples first"):
        return self.layer(x) if layout == "samples first" else self.layer(x.transpose(0, 1)).transpose(0, 1)


def test_every_setting_of_a_call_has_a_layout_of_its_own():
    """With T = B the shapes of the two are alike."""
    model, x = Switched(), randn(B, B, D)
    expected = clipped_mean(per_sample_gradients(model, [x]), max_grad_norm=0.1, batch_size=B)
    engine = noise_free_engine(model, batch_size=B, max_grad_norm=0.1, steps=2)
    for layout in ("samples first", "time first"):
        ramp_loss(model(x, layout=layout)).backward()
        engine.privatize()
        assert relative_error(gradients_of(model), expected) < 1e-12
        model.zero_grad()


class Expanded(nn.Module):
    """A parameter that is expanded along the samples twice, in two dimensions."""

    def __init__(self):
        super().__init__()
        self.layer, self.token = nn.Linear(D, D).double(), nn.Parameter(randn(1, 1, D))

    def forward(self, x):
        B, T, _ = x.shape
        return self.layer(x) + self.token.expand(B, T, D) + self.token.expand(T, B, D).transpose(0, 1).sin()


def test_outputs_with_the_samples_in_different_dimensions_are_refused():
    model = Expanded()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(BatchLayoutError, match=r"expand with token is called with the samples .* different dimensions"):
        model(randn(B, B, D))


class Branching(nn.Module):
    """A layer whose input lies time first in the one course, and samples first in the other, which has a layer more."""

    def __init__(self):
        super().__init__()
        self.layer, self.more = nn.Linear(D, D).double(), nn.Linear(D, D).double()
        self.turned = False

    def forward(self, x):
        if not self.turned:
            return self.layer(x)
        return self.layer(self.more(x).transpose(0, 1)).transpose(0, 1)


@pytest.mark.filterwarnings("ignore:No gradient reached")
def test_a_later_course_with_the_samples_in_another_dimension_is_refused():
    model, x = Branching(), randn(B, B, D)
    engine = noise_free_engine(model, batch_size=B, steps=2)
    ramp_loss(model(x)).backward()
    engine.privatize()
    model.zero_grad()
    model.turned = True
    with pytest.raises(BatchLayoutError, match=r"linear with layer.* different dimensions"):
        model(x)


class TimeFirst(nn.Module):
    """[B, T, D], flattened time first after a layer that begins at zero."""

    def __init__(self, second):
        super().__init__()
        self.first = nn.Linear(D, D, bias=False).double()
        self.second = nn.Parameter(second)
        nn.init.zeros_(self.first.weight)

    def forward(self, x):
        h = self.first(x).transpose(0, 1).reshape(-1, D)
        return (h @ self.second).view(x.shape[1], -1, D).transpose(0, 1)


def test_rows_that_are_all_alike_tell_no_order():
    """Nor does verification: the gradient of the layer after them is zero, until the one before has learnt."""
    model = TimeFirst(randn(D, D))
    noise_free_engine(model, batch_size=B)
    with pytest.raises(BatchLayoutError, match=r"sees equal rows in a tensor of shape \(18, 3\)"):
        model(randn(B, T, D))


def test_rows_that_are_all_alike_lie_as_those_that_they_were_made_of():
    """Zeros that come out of an einsum over rows that lie time first."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, D).double(), nn.Parameter(torch.zeros(D, D).double())

        def forward(self, x):
            h = self.first(x).transpose(0, 1).reshape(-1, D)
            return torch.einsum("nd,de->ne", h, self.second).view(x.shape[1], -1, D).transpose(0, 1)

    model, x = Late(), randn(B, T, D)
    engine = noise_free_engine(model, batch_size=B, max_grad_norm=0.1, steps=2)
    model(x)
    engine.detach()
    with torch.no_grad():
        model.second.copy_(randn(D, D))
    expected = clipped_mean(per_sample_gradients(model, [x]), max_grad_norm=0.1, batch_size=B)
    with torch.no_grad():
        learnt = model.second.clone()
        model.second.zero_()
    engine = noise_free_engine(model, batch_size=B, max_grad_norm=0.1, steps=2)
    ramp_loss(model(x)).backward()
    engine.privatize()
    model.zero_grad()
    with torch.no_grad():
        model.second.copy_(learnt)
    ramp_loss(model(x)).backward()
    engine.privatize()
    assert relative_error(gradients_of(model), expected) < 1e-12


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(D, D).double(), nn.Linear(D, D).double()

    def forward(self, x):
        return self.head(self.encoder(x).transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("steps", [B, T])
def test_a_part_that_is_called_time_first_is_refused(steps):
    """T = B: the head would be clipped step by step of time, each with the whole threshold."""
    model = TwoParts()
    engine = noise_free_engine(model, batch_size=B, sample_size=20)
    logical_batch = next(iter(batches := engine.batches(TensorDataset(randn(20, steps, D)), B)))
    (x,) = next(iter(logical_batch))
    with pytest.raises(BatchLayoutError, match=r"dimension 0 or 1 may hold the 4 samples|no input of Linear has"):
        model.head(model.encoder(x).transpose(0, 1))
    batches.close()


def test_the_whole_model_may_turn_dimensions():
    assert_exact(TwoParts(), randn(B, B, D))


class Attending(nn.Module):
    """Takes a mask [T, T], and perhaps positions [T]: inputs without samples."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.table = nn.Linear(D, D), nn.Linear(D, D), nn.Embedding(9, D)

    def forward(self, x, mask, positions=None):
        if positions is not None:
            x = x + self.table(positions)
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), x, attn_mask=mask)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_inputs_without_samples_of_the_size_of_the_batch(size, positions):
    torch.manual_seed(0)
    model, x = Attending().double(), randn(size, size, D)
    others = [torch.ones(size, size).tril().bool(), *([torch.arange(size)] if positions else [])]
    if not positions:
        model.table.requires_grad_(False)

    def call(rows):
        return model(rows, *others)

    parameters = [p for p in model.parameters() if p.requires_grad]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    found = [torch.autograd.grad(ramp_loss(call(row)), parameters) for row in x.split(1)]
    per_sample = [dict(zip(names, gradients, strict=True)) for gradients in found]
    expected = clipped_mean(per_sample, max_grad_norm=0.1, batch_size=size)
    assert relative_error(private_step(model, (x,), call=call, max_grad_norm=0.1), expected) < 1e-12


def test_verification_by_hand_takes_a_mask_of_the_size_of_the_batch():
    """And still finds what mixes samples."""
    model, x, mask = Attending().double(), randn(4, 4, D), torch.ones(4, 4).tril().bool()
    model.table.requires_grad_(False)
    engine = noise_free_engine(model, batch_size=4)
    engine.verify(x, mask)
    engine.detach()
    model.register_forward_hook(lambda *args: args[-1] - args[-1].mean(0))
    with pytest.raises(VerificationError, match="mixes the samples"):
        noise_free_engine(model, batch_size=4).verify(x, mask)


class Masked(nn.Module):
    """A mask where anything is masked, as transformers makes one for padding."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        masked = x[..., 0] < -9
        h = self.first(x)
        if masked.any():
            h = h.masked_fill(masked[..., None], 0)
        return self.last(h)


@pytest.mark.parametrize("sample", range(B))
def test_a_branch_that_any_sample_may_decide(sample):
    """The third may be the first that takes it, when the layout is found from two samples and from three."""
    x = randn(B, T, D)
    x[sample, 1, 0] = -10
    assert_exact(Masked(), x)
