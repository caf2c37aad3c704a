"""Kinds of attention that stay within a unit, exact against each unit alone; and the same ones that look across.

Failure modes: 12 test_each_kind_that_looks_across_is_caught.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from dpshard import packed_unit_ids
from dpshard.errors import BatchLayoutError, ConfigurationError, VerificationError
from dpshard.losses import packed_cross_entropy
from tests.oracle import TOLERANCE, gradients_of, noise_free_engine, relative_error
from tests.packing.models import LanguageModel, U, documents, expected, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches", "ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute"),
]

DOCUMENTS = documents()


class Attends(LanguageModel):
    """A language model with another attention, `attend(q, k, v, what it gets)`, on rows [R, T] or a flat stream [T]."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, ids, positions, unit_ids):
        x = self.tokens(ids) + self.places(positions)
        attended = self.attend(*self.qkv(self.norm(x)).chunk(3, -1), unit_ids)
        return self.head(self.rms(x + self.out(attended) * self.gate))


def masked(q, k, v, mask):
    """A mask [T, T], [R, T, T], or one with heads [R, 1, T, T]; True or 0 where a token is seen."""
    if mask.dim() < 4:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]


def varlen(q, k, v, cu_seqlens):
    """As kernels of variable lengths compute it: each stretch between two ends by itself."""
    seen = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        part = (x[None, start:end] for x in (q, k, v))
        seen.append(F.scaled_dot_product_attention(*part, is_causal=True)[0])
    return torch.cat(seen)


def flexible(q, k, v, how):
    """torch's flex_attention, with a BlockMask or with the units of which it makes one."""
    mask = how if isinstance(how, flex.BlockMask) else block_mask(how)
    return flex.flex_attention(q[:, None], k[:, None], v[:, None], block_mask=mask)[:, 0]


def block_mask(units_RT):
    def within(b, h, q, kv):
        return (units_RT[b, q] == units_RT[b, kv]) & (q >= kv)

    R, T = units_RT.shape
    return flex.create_block_mask(within, R, None, T, T, device="cpu")


def same_RTT(units_RT):
    return (units_RT[:, :, None] == units_RT[:, None]).tril()


KINDS = {
    "mask of one row": (masked, lambda units: same_RTT(units)[0]),
    "mask": (masked, same_RTT),
    "mask of numbers": (masked, lambda u: torch.zeros(1).double().masked_fill(~same_RTT(u), -torch.inf)[:, None]),
    "varlen": (varlen, lambda units: F.pad(torch.bincount(units.flatten()).cumsum(0), (1, 0)).int()),
    "flex": (flexible, lambda units: units),
    "flex, told": (flexible, block_mask),
}
"""An attention, and what the model gets for it."""


@pytest.fixture(autouse=True)
def _flex_on_cpu(monkeypatch):
    """On CPUs torch refuses the backward of its fused kernel. Without torch.compile, flex_attention is plain torch."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()


def stream(docs):
    """Ids, positions and units [1, T] of documents one after another."""
    ids, positions = torch.cat(docs)[None], torch.cat([torch.arange(len(x)) for x in docs])[None]
    return ids, positions, packed_unit_ids(position_ids=positions)


def update_of(model, kind, docs, threshold, *, across=False):
    """The update of a private step over a stream; `across`: the attention takes two documents for one."""
    ids, positions, units = stream(docs)
    told = KINDS[kind][1](units // 2 if across else units)
    engine = noise_free_engine(model, batch_size=len(docs), max_grad_norm=threshold)
    flat = kind == "varlen"
    args = (ids[0], positions[0], told) if flat else (ids, positions, told)
    try:
        with engine.packed(units[0] if flat else units, U):
            losses = packed_cross_entropy(model(*args), args[0], units[0] if flat else units, U)
            losses.mean().backward()
        engine.privatize()
        return gradients_of(model)
    finally:
        engine.detach()
        model.zero_grad()


def alone_by(kind):
    def loss(model, ids):
        x, positions, units = stream([ids])
        told = KINDS[kind][1](units)
        args = (x[0], positions[0], told) if kind == "varlen" else (x, positions, told)
        return F.cross_entropy(model(*args).view(len(ids), -1)[:-1], ids[1:])

    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_attention_is_exact(kind):
    model = Attends(KINDS[kind][0])
    threshold, update = expected(LanguageModel(), DOCUMENTS)
    found = update_of(model, kind, DOCUMENTS, threshold)
    assert relative_error(found, update) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_that_looks_across_is_caught(kind):
    with pytest.raises(VerificationError, match="attention looks across units"):
        update_of(Attends(KINDS[kind][0]), kind, DOCUMENTS, 1.0, across=True)


@pytest.mark.parametrize("kind", ["mask", "flex, told"])
def test_masks_of_several_rows(kind):
    """The part of a unit is that of its own row."""
    model = Attends(KINDS[kind][0])
    threshold, update = expected(LanguageModel(), DOCUMENTS)

    def forward(batch):
        return model(batch["input_ids"], batch["position_ids"], KINDS[kind][1](batch["unit_ids"]))

    assert relative_error(step(model, DOCUMENTS, threshold, forward=forward), update) <= TOLERANCE


def test_a_block_mask_of_other_tokens_is_refused():
    model = Attends(flexible)
    ids, positions, units = stream(DOCUMENTS)
    engine = noise_free_engine(model, batch_size=len(DOCUMENTS))
    with pytest.raises(VerificationError, match="Make it of T by T tokens"), engine.packed(units, U):
        model(ids, positions, block_mask(F.pad(units, (0, 4), value=-1)))
    engine.detach()


# --- units from what collators give ----------------------------------------------------------------------------------


def test_units_of_positions_and_of_cumulative_lengths():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]])
    assert packed_unit_ids(position_ids=positions).tolist() == [[0, 0, 0, 1, 2, 2], [3, 3, 4, 4, 4, 4]]
    assert packed_unit_ids(position_ids=positions[0] + 2).tolist() == [0, 0, 0, 1, 2, 2]  # as RoBERTa counts
    ends = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert packed_unit_ids(cu_seqlens=ends).tolist() == [0, 0, 0, 2, 2]
    assert packed_unit_ids(cu_seqlens=ends, tokens=7).tolist() == [0, 0, 0, 2, 2, -1, -1]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "takes position_ids, or cu_seqlens"),
        ({"position_ids": torch.arange(3), "cu_seqlens": torch.tensor([0, 3])}, "takes position_ids, or cu_seqlens"),
        ({"position_ids": torch.arange(3), "tokens": 3}, "takes position_ids, or cu_seqlens"),
        ({"position_ids": torch.tensor([0, 1, 2, 5, 6])}, r"begin units at \[0, 5\]"),
        ({"position_ids": torch.tensor([[3, 4, 0, 1]])}, r"begin units at \[0, 3\]"),
        ({"position_ids": torch.rand(4)}, "whole numbers"),
        ({"position_ids": torch.zeros(0).long()}, "whole numbers"),
        ({"cu_seqlens": torch.tensor([1, 3])}, "begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, "never fall"),
        ({"cu_seqlens": torch.tensor([0])}, r"\[U \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0, 8]), "tokens": 7}, "ends at token 8"),
    ],
)
def test_positions_and_lengths_that_tell_no_units(given, match):
    with pytest.raises(BatchLayoutError, match=match):
        packed_unit_ids(**given)


def test_a_loss_of_other_shapes_is_refused():
    with pytest.raises(ConfigurationError, match="logits"):
        packed_cross_entropy(torch.zeros(5, 3), torch.zeros(5).long(), torch.zeros(1, 4).long(), 2)
