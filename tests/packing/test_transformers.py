"""Hugging Face models on packed rows with `position_ids`, against each document alone."""

import pytest
import torch
import torch.nn.functional as F

from dpshard import Packing, packed_unit_ids
from dpshard.errors import VerificationError
from dpshard.losses import packed_cross_entropy
from tests.oracle import TOLERANCE, gradients_of, noise_free_engine, relative_error
from tests.packing.models import U, V, documents, expected, step

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:This loop feeds its own batches")
SMALL = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0}


def llama(attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **SMALL, **sizes, num_key_value_heads=2, tie_word_embeddings=True, attn_implementation=attention
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2(attention):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    pdrop = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(**SMALL, **sizes, **pdrop, attn_implementation=attention)
    return transformers.GPT2LMHeadModel(config).double()


def alone(model, ids):
    positions = torch.arange(len(ids))[None]
    logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1], ids[1:])


# Norms of Llama compute in float32, whatever the dtype of the model.
@pytest.mark.parametrize(("build", "tolerance"), [(llama, 1e-6), (gpt2, TOLERANCE)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [Packing(rows=2, tokens=12), Packing(rows=1, tokens=60)], ids=["rows", "stream"])
def test_position_ids_keep_documents_apart(build, tolerance, attention, packing):
    model, docs = build(attention), documents()
    threshold, update = expected(model, docs, loss=alone)

    def forward(batch):
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits

    assert relative_error(step(model, docs, threshold, packing=packing, units=20, forward=forward), update) <= tolerance


@pytest.mark.parametrize("with_positions", [True, False])
def test_a_mask_of_padding_lets_documents_see_each_other(with_positions):
    """With an attention_mask, transformers reads no documents from position_ids."""
    model = llama("sdpa")

    def forward(batch):
        positions = {"position_ids": batch["position_ids"]} if with_positions else {}
        mask = (batch["unit_ids"] >= 0).long()
        return model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, **positions).logits

    with pytest.raises(VerificationError, match="attention looks across units"):
        step(model, documents()[:7], 1.0, forward=forward)


def test_a_loss_of_the_model_is_a_token_mean():
    model = llama("sdpa")

    def forward(batch):
        given = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
        return model(**given, use_cache=False).logits

    with pytest.raises(VerificationError, match="packed_cross_entropy"):
        step(model, documents(), 1.0, forward=forward)


@pytest.mark.parametrize("flash", [False, True])
def test_a_collator_that_flattens_in_a_loop_of_ones_own(flash):
    """A stream [1, T] without padding; with lengths for flash attention, too, which other attention ignores."""
    model, docs = llama("sdpa"), documents()
    threshold, update = expected(model, docs, loss=alone)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=flash)
    batch = collate([{"input_ids": ids} for ids in docs])
    units = packed_unit_ids(position_ids=batch["position_ids"])
    if flash:
        assert torch.equal(units[0], packed_unit_ids(cu_seqlens=batch["cu_seq_lens_q"]))
    labels = batch.pop("labels")
    engine = noise_free_engine(model, batch_size=len(docs), max_grad_norm=threshold)
    with engine.packed(units, U):
        logits = model(**batch, use_cache=False).logits
        packed_cross_entropy(logits, labels, units, U).mean().backward()
    engine.privatize()
    assert relative_error(gradients_of(model), update) <= 1e-6
    engine.detach()
