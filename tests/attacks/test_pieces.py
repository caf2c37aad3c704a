"""Models that cut samples into pieces, [k * B, ...], by a length, size or number that changes between micro-batches.

Failure modes: 13, the order of rows is that of an earlier length, at which a sample had one piece.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from dpshard.errors import BatchLayoutError
from tests.attacks.exact_steps import require_exact_steps
from tests.attacks.oracle import ALLOWED, influence
from tests.oracle import noise_free_engine, ramp_loss, randn

D = 64


class Pieces(nn.Module):
    """Windows of 8 frames are encoded as samples of their own, one batch apart; their mean is the output."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x, size=8):
        pieces = x.split(size, 1)
        rows = torch.cat([piece.mean(1) for piece in pieces])
        return self.encoder(rows).view(len(pieces), len(x), -1).sin().sum(0)


class Flattened(Pieces):
    """Long inputs are flattened in another order than short ones."""

    def samples_first(self, x):
        return x.shape[1] <= 8

    def forward(self, x):
        B, T, _ = x.shape
        if self.samples_first(x):
            return self.encoder(x.reshape(B * T, D)).view(B, T, -1)
        return self.encoder(x.transpose(0, 1).reshape(T * B, D)).view(T, B, -1).transpose(0, 1)


class TimesFirst(Flattened):
    """[T * B] looks like [B * T] while T is 1."""

    def samples_first(self, x):
        return False


class BySamples(Flattened):
    """The number of samples decides the order of rows."""

    def samples_first(self, x):
        return x.shape[0] <= 4


class ByStrides(Flattened):
    """Whether the input is contiguous decides the order of rows."""

    def samples_first(self, x):
        return x.is_contiguous()


class Tiles(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        rows = torch.cat([tile.flatten(1) for strip in x.split(8, 1) for tile in strip.split(8, 2)])
        return self.encoder(rows).view(-1, len(x), 4).sin().sum(0)


def same(x):
    return x


def transposed(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def gapped(x):
    return torch.cat([x, x], 2)[..., :D]


def expanded(x):
    return x[:, :1].expand(-1, 5, -1)


CASES = {
    "pieces": (Pieces, [(randn(6, T, D), ()) for T in (8, 8, 8, 32, 16, 8, 64)]),
    "order by length": (Flattened, [(randn(6, T, D), ()) for T in (6, 6, 6, 12, 6, 24)]),
    "one row": (TimesFirst, [(randn(6, T, D), ()) for T in (1, 1, 1, 4, 1, 6)]),
    "tiles": (Tiles, [(randn(6, *size), ()) for size in ((8, 8), (8, 8), (8, 8), (32, 8), (8, 16), (32, 32))]),
    "strides": (ByStrides, [(x(randn(6, 5, D)), ()) for x in (same, transposed, same, gapped, expanded)]),
    "number": (Pieces, [(randn(6, 24, D), (size,)) for size in (24, 24, 24, 16, 24, 17, 18)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_every_size_has_its_own_order_of_rows(case, verify, compiled):
    build, calls = CASES[case]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build().double()
    if compiled:
        model.encoder.compile(backend="aot_eager")
    require_exact_steps(model, calls, verify=verify)


class Recordings(Dataset):
    """Four short ones come first; the last is loud, and the others are quiet."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        draws = torch.Generator().manual_seed(i)
        if i == 11:
            return torch.randn(1, D, generator=draws).expand(32, D)
        return 1e-3 * torch.randn(8 if i < 4 else 32, D, generator=draws)


def test_one_long_sample_counts_as_one():
    """By the order of the first, short micro-batch it counted 3.7 times."""

    def build():
        model = Pieces()
        with torch.no_grad():
            for layer in (model.encoder[0], model.encoder[2]):
                layer.bias.zero_()
        return model

    def loop(model, engine, optimizer, dataset):
        for batch in engine.batches(dataset, micro_batch_size=4, collate_fn=torch.stack):
            for x in batch:
                (1e3 * model(x).square().sum(1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert influence(build, loop, Recordings(), left_out=[11]) <= ALLOWED


class Counted(Pieces):
    """The size of pieces is an attribute; numbers within a power of two are one kind."""

    size = 24

    def forward(self, x):
        return super().forward(x, self.size)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_more_pieces_than_were_probed_are_refused(verify, compiled):
    """Rows in the order of single pieces would mix samples; one then counted 3.7 times."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Counted().double()
    if compiled:
        model.encoder.compile(backend="aot_eager")
    noise_free_engine(model, batch_size=6, steps=2, verify=verify)
    x = randn(6, 24, D)
    ramp_loss(model(x)).backward()
    model.size = 17
    with pytest.raises(BatchLayoutError, match=r"encoder\.[02]\.\w+: 2 rows of each sample .* there were 1"):
        ramp_loss(model(x)).backward()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_an_order_by_the_number_of_samples_is_refused(verify, compiled):
    """Probes of 2 and 3 samples took the other branch, and a sample counted 3.6 times."""
    torch._dynamo.reset()
    model = BySamples()
    if compiled:
        model.compile(backend="aot_eager")
    noise_free_engine(model, batch_size=6, steps=2, verify=verify)
    for _ in range(2):  # a script may catch the first error
        with pytest.raises(BatchLayoutError, match="different functions on 6 samples than on 2"):
            model(torch.randn(6, 4, D))
    model(torch.randn(4, 4, D))
