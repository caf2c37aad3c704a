"""A unit of a packed row that overflows must not decide about its neighbours, whose attention reads 0 * inf = NaN.

The overflow begins in a step that is not verified. Each attack stands beside the honest case that looks like it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import LogicalBatchError
from tests.oracle import gradients_of, noise_free_engine, relative_error
from tests.packing.models import PACKING, D, T, U, V, documents, inputs, unit_losses

ODD = V - 1
"""A token whose activations overflow."""
UNVERIFIED = 3
"""A step that is not verified."""


class Overflows(nn.Module):
    """Attention within units, or none, behind an activation that one token makes infinite once `size` is large."""

    def __init__(self, *, attends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attends = attends
        self.tokens, self.qkv, self.head = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, V)
        self.size = nn.Parameter(torch.ones(()), requires_grad=False)
        self.double()

    def forward(self, ids, positions, unit_ids):
        x = self.tokens(ids)
        x = torch.where((ids == ODD)[..., None], x * self.size * self.size, x)
        q, k, v = self.qkv(x).chunk(3, -1)
        if not self.attends:
            return self.head(q + k + v)
        within = (unit_ids[:, :, None] == unit_ids[:, None, :]).tril()
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=within))


def texts(odd: set[int]) -> list[torch.Tensor]:
    """Return eight texts; those in `odd` have the token that overflows."""
    found = [ids.clamp(max=ODD - 1) for ids in documents(lengths=(3, 4, 2, 3, 4, 3, 2, 3))]
    for i in odd:
        found[i][1] = ODD
    return found


def last_gradients(model, docs, **options):
    """Return what the step that overflows releases, of a loop over packed micro-batches."""
    engine = noise_free_engine(
        model, batch_size=len(docs), sample_size=len(docs), steps=UNVERIFIED + 1, max_grad_norm=0.01, **options
    )
    for logical_batch in engine.batches(docs, U, packing=PACKING):
        model.zero_grad()
        if logical_batch.step == UNVERIFIED:
            model.size.data.fill_(1e200)
        for batch in logical_batch:
            unit_losses(model(*inputs(batch)), batch).mean().backward()
        engine.privatize()
    return gradients_of(model), engine.metrics()


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_a_unit_that_takes_the_gradients_of_its_row_away_is_refused(mode, style):
    with pytest.raises(LogicalBatchError, match="one packed row have no finite gradient"):
        last_gradients(Overflows(), texts({1}), clipping_mode=mode, clipping_style=style)


def test_a_unit_that_loses_only_its_own_gradient_contributes_nothing():
    found, metrics = last_gradients(Overflows(attends=False), texts({1}))
    assert metrics["nonfinite_samples"] == 1
    docs = texts(set())
    rest, _ = last_gradients(Overflows(attends=False), docs[:1] + docs[2:])
    n = len(docs)
    assert relative_error({k: g * n for k, g in found.items()}, {k: g * (n - 1) for k, g in rest.items()}) <= 1e-10


def own_steps(odd: list[list[bool]], *, attends: bool, repeat: bool = False):
    """Train on two rows of two units each in an own loop; `odd`: which of them overflow in the last step."""
    model = Overflows(attends=attends)
    engine = noise_free_engine(model, batch_size=4, steps=UNVERIFIED + 1 + repeat, max_grad_norm=0.01)
    half = T // 2
    unit_ids = torch.tensor([[0] * half + [1] * half, [2] * half + [3] * half])
    ids = torch.randint(0, ODD, (2, T), generator=torch.Generator().manual_seed(1))
    ids[:, 1], ids[:, half + 1] = (torch.where(torch.tensor(of), ODD, 0) for of in zip(*odd, strict=True))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(T) % half == half - 1, -100)
    batch = {"input_ids": ids, "position_ids": torch.arange(T).expand(2, T) % half, "unit_ids": unit_ids}

    def step():
        with engine.packed(unit_ids, 4):
            unit_losses(model(*inputs(batch)), {**batch, "labels": labels}, 4).mean().backward()
        engine.privatize()
        model.zero_grad()

    for i in range(UNVERIFIED + 1):
        if i == UNVERIFIED:
            model.size.data.fill_(1e200)
        try:
            step()
        except LogicalBatchError:
            if not repeat:
                raise
            model.size.data.fill_(1.0)
            step()
    return engine


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_units_of_several_rows_may_each_lose_their_gradient_in_an_own_loop():
    engine = own_steps([[True, False], [True, False]], attends=False)
    assert engine.metrics()["nonfinite_samples"] == 2


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.parametrize("attends", [True, False])
def test_units_of_one_row_are_refused_in_an_own_loop(attends):
    with pytest.raises(LogicalBatchError, match="one packed row"):
        own_steps([[True, not attends], [False, False]], attends=attends)


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_an_own_loop_that_was_refused_begins_anew():
    assert own_steps([[True, False], [False, False]], attends=True, repeat=True).step == UNVERIFIED + 1
