"""Language models of transformers, tiny and random, all parameters trainable: exact, untouched.

Failure modes: 12 test_a_balancing_loss_is_refused; 13 test_positions_that_are_handed_in.
"""

from contextlib import nullcontext

import pytest
import torch

from dpshard.errors import VerificationError
from tests.grids import chosen, each
from tests.oracle import noise_free_engine
from tests.zoo.zoo import NO_DROPOUT, SIZES, TOKENS, VOCABULARY, Wide, assert_model_exact, tokens

transformers = pytest.importorskip("transformers")

TEXT = {**SIZES, **TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 16}

DECODERS = {
    "GPT2": {
        **TOKENS,
        "vocab_size": VOCABULARY,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "Llama": {**TEXT, "num_key_value_heads": 1},
    "Qwen3": {**TEXT, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True},
    "Gemma2": {**TEXT, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4},
    "VaultGemma": {**TEXT, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4},
    "Gemma3": {**TEXT, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 4},
    "Mistral": {**TEXT, "num_key_value_heads": 1, "sliding_window": 4},
    "Phi": TEXT,
    "Phi3": {**TEXT, "num_key_value_heads": 1},
    "Cohere": {**TEXT, "num_key_value_heads": 1},
    "GPTNeoX": TEXT,
    "OPT": {**TEXT, "ffn_dim": 12, "word_embed_proj_dim": 8, "dropout": 0.0},
    "Bloom": {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 8, "n_layer": 2, "n_head": 2},
    "Falcon": TEXT,
    "Rwkv": {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "context_length": 16},
}


@pytest.mark.parametrize("name", chosen(DECODERS, "GPT2", "Llama", "Rwkv", "VaultGemma"))
def test_decoders(name):
    configuration = getattr(transformers, name + ("TextConfig" if name == "Gemma3" else "Config"))
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + head)(configuration(**DECODERS[name]))
    assert_model_exact(model, {"input_ids": tokens()})


EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 6, "head_dim": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 4,
        "q_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
    },
    "Jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 2,
    },
}


def mixture(name, **options):
    sizes = {**TEXT, "num_key_value_heads": 1, "num_experts_per_tok": 2, **EXPERTS[name], **options}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))


@pytest.mark.parametrize(("name", "implementation"), each(EXPERTS, ["eager", "grouped_mm", "batched_mm"]))
def test_mixtures_of_experts(name, implementation):
    model = mixture(name)
    model.set_experts_implementation(implementation)
    assert_model_exact(model, {"input_ids": tokens()})


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_a_balancing_loss_is_refused():
    """It counts an expert's tokens over the whole micro-batch."""
    ids = tokens()
    for balanced in (False, True):
        model = mixture("Mixtral", output_router_logits=balanced, router_aux_loss_coef=1.0).double()
        noise_free_engine(model, batch_size=3)
        refused = pytest.raises(VerificationError, match="load-balancing loss") if balanced else nullcontext()
        with Wide(), refused:
            model(input_ids=ids, labels=ids)


@pytest.mark.exhaustive
def test_switch_transformers():
    """Experts are separate modules; each sequence has its capacity."""
    configuration = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_heads=2, num_layers=2, num_decoder_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=3,
        dropout_rate=0.0, router_jitter_noise=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(configuration)
    assert_model_exact(model, {"input_ids": tokens(), "decoder_input_ids": tokens(4)})


ENCODERS = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {
        "dim": 8,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 12,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "Albert": {"embedding_size": 6, "classifier_dropout_prob": 0.0},
    "Electra": {"embedding_size": 6},
    "ModernBert": {
        "global_attn_every_n_layers": 2,
        "local_attention": 4,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.0,
    },
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "pooler_hidden_size": 8,
    },
}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("name", chosen(ENCODERS, "Bert", "DebertaV2"))
def test_encoders(name, head):
    configuration = getattr(transformers, f"{name}Config")(**{**TEXT, **NO_DROPOUT, **ENCODERS[name]})
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = 0
    assert_model_exact(
        getattr(transformers, name + head)(configuration), {"input_ids": tokens(), "attention_mask": mask}
    )


@pytest.mark.parametrize("name", chosen(["T5", "T5-gated", "Bart"], "T5"))
def test_encoder_decoders(name):
    sizes = {**TOKENS, "vocab_size": VOCABULARY, "d_model": 8, "decoder_start_token_id": 2}
    if name == "Bart":
        sides = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
        model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                **{**sizes, **sides, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 16},
                dropout=0.0,
                forced_eos_token_id=2,
            )
        )
    else:
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if name == "T5-gated" else {}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                **{**sizes, **gated, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2},
                relative_attention_num_buckets=8,
                dropout_rate=0.0,
            )
        )
    assert_model_exact(model, {"input_ids": tokens(), "decoder_input_ids": tokens(4)})


@pytest.mark.parametrize("name", chosen(["Mamba", "Mamba2"], "Mamba"))
def test_state_space_models(name):
    sizes = {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    more = {"time_step_rank": 2} if name == "Mamba" else {"head_dim": 4, "num_heads": 4, "n_groups": 1, "chunk_size": 4}
    configuration = getattr(transformers, f"{name}Config")(**sizes, **more, conv_kernel=3)
    assert_model_exact(getattr(transformers, f"{name}ForCausalLM")(configuration), {"input_ids": tokens()})


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_that_are_handed_in(rows):
    """position_ids [1, T] have no sample dimension, but belong to every sample."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**DECODERS["GPT2"]))
    positions = torch.arange(5).flip(0).repeat(rows, 1)
    assert_model_exact(model, {"input_ids": tokens(), "position_ids": positions})
