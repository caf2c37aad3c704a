"""Parameter-efficient fine-tuning: peft's adapters on tiny models, biases alone, parts of a model, phases.

What is frozen has no gradient and no noise; and the cost of privacy is that of what is trained, counted in bytes that
are kept for backward and in FLOPs.

Failure modes: 8 test_what_autograd_hides_is_refused.
"""

import warnings

import pytest
from torch.utils.flop_counter import FlopCounterMode

import dpshard.kernels.flops  # noqa: F401
from dpshard.errors import UnsupportedParameterError, VerificationError
from tests.grids import chosen
from tests.interception.test_frozen import saved_bytes
from tests.oracle import noise_free_engine
from tests.zoo.zoo import NO_DROPOUT, SIZES, TOKENS, VOCABULARY, Wide, assert_model_exact, images, tokens

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="peft, in the extra [dev], is not installed: its adapters are not tested")

TEXT = {**SIZES, **TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
LINEAR = ["q_proj", "v_proj", "down_proj"]


def llama(**sizes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "num_key_value_heads": 1, **sizes}))


def adapted(kind, model=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on names and tied weights
        return peft.get_peft_model(model or llama(), getattr(peft, f"{kind}Config")(**options))


CAUSAL = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "LoRA": ("Lora", {"r": 2, "target_modules": LINEAR}),
    "LoRA of embeddings, rank-stabilised": (
        "Lora",
        {"r": 2, "use_rslora": True, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "LoRA and a whole head": ("Lora", {"r": 2, "target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
    "DoRA": ("Lora", {"r": 2, "use_dora": True, "target_modules": LINEAR}),
    "IA3": ("IA3", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prefix tuning": ("PrefixTuning", {"num_virtual_tokens": 3}),
    "prefix tuning, projected": (
        "PrefixTuning",
        {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 6},
    ),
    "prompt tuning": ("PromptTuning", {"num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoder", {"num_virtual_tokens": 3, "encoder_hidden_size": 6}),
    "LLaMA-Adapter": ("AdaptionPrompt", {"adapter_len": 3, "adapter_layers": 1}),
    "LoKr": ("LoKr", {"r": 2, "target_modules": LINEAR}),
    "VeRA": ("Vera", {"r": 2, "target_modules": ["q_proj"]}),
    "norms": ("LNTuning", {"target_modules": ["input_layernorm"]}),
}


@pytest.mark.parametrize("name", chosen(ADAPTERS, "LoRA", "DoRA", "IA3", "prompt tuning"))
def test_adapters(name):
    kind, options = ADAPTERS[name]
    model = adapted(kind, **CAUSAL, **options)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < trained < sum(p.numel() for p in model.parameters())
    assert_model_exact(model, {"input_ids": tokens()})


@pytest.mark.exhaustive
def test_lora_of_experts():
    """Adapters of router and attention; the frozen experts between them are followed."""
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2)
    )
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        lora = adapted("Lora", model, **CAUSAL, r=2, target_modules=["q_proj", "o_proj"])
        assert_model_exact(lora, {"input_ids": tokens()})
        model = lora.unload()


def test_an_adapter_of_convolutions_and_linear_layers():
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **NO_DROPOUT, image_size=8, patch_size=4)
    )
    options = {"r": 2, "target_modules": ["q_proj", "projection"], "modules_to_save": ["classifier"]}
    model = adapted("Lora", vit, **options)
    assert {name.split(".")[-4] for name, p in model.named_parameters() if "lora" in name} >= {"projection"}
    assert_model_exact(model, {"pixel_values": images()})


# --- without peft -----------------------------------------------------------------------------------------------------


def train_only(model, wanted):
    for name, p in model.named_parameters():
        p.requires_grad_(wanted(name))
    assert any(p.requires_grad for p in model.parameters())
    return model


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **NO_DROPOUT))


@pytest.mark.parametrize("style", [{}, {"clipping_mode": "ghost"}])
def test_biases_alone(style):
    """BiTFiT; Zaken et al. 2021, arXiv:2106.10199."""
    model = train_only(bert(), lambda name: name.endswith("bias"))
    assert_model_exact(model, {"input_ids": tokens()}, **style)


def test_a_part_of_a_model():
    model = train_only(llama(), lambda name: "layers.1.mlp" in name or name == "model.norm.weight")
    assert_model_exact(model, {"input_ids": tokens()})


def test_what_is_frozen_changes_between_phases():
    """First the head, then the biases, then all: one engine per phase, detached at its end."""
    model = bert()
    for wanted in (
        lambda name: name.startswith("classifier"),
        lambda name: name.endswith("bias"),
        lambda name: True,
    ):
        assert_model_exact(train_only(model, wanted), {"input_ids": tokens()})


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_what_autograd_hides_is_refused():
    """LoHa's product is a separate autograd function; verification and the hook on parameters notice it."""
    ids = tokens()
    for verify in (True, False):
        model = adapted("LoHa", **CAUSAL, r=2, target_modules=["q_proj"]).double()
        engine = noise_free_engine(model, batch_size=3, verify=verify)
        error = VerificationError if verify else UnsupportedParameterError
        with Wide(), pytest.raises(error, match=r"hada_w.*autograd"):
            model(input_ids=ids).logits.square().mean().backward()
        engine.detach()


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_a_matrix_that_is_filled_in_place_is_refused():
    model = adapted("OFT", **CAUSAL, r=0, oft_block_size=2, target_modules=["q_proj"])
    noise_free_engine(model, batch_size=3)
    with pytest.raises(UnsupportedParameterError, match=r"oft_R.*out of place"):
        model(input_ids=tokens())


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_the_cost_of_privacy_is_that_of_what_is_trained():
    """LoRA of rank 1, 2 and 4, and all parameters: bytes and FLOPs that the engine adds to a step."""
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    ids = tokens(12)

    def cost(build):
        model = build()

        def step():
            output = model(input_ids=ids, use_cache=False).logits.square().flatten(1).sum(1).mean()
            output.backward()

        def flops():
            with FlopCounterMode(display=False) as counter:
                step()
            return counter.get_total_flops()

        plain = flops(), saved_bytes(model, lambda: model(input_ids=ids, use_cache=False).logits)
        model.zero_grad()
        engine = noise_free_engine(model, batch_size=3, verify=False)
        step()  # exclude one-time work
        private = flops(), saved_bytes(model, lambda: model(input_ids=ids, use_cache=False).logits)
        engine.detach()
        return plain, private

    def lora(rank):
        return cost(lambda: adapted("Lora", llama(**sizes), **CAUSAL, r=rank, target_modules=["q_proj", "v_proj"]))

    ranks = {rank: lora(rank) for rank in (1, 2, 4)}
    full = cost(lambda: llama(**sizes))
    extra = {rank: private - plain for rank, ((plain, _), (private, _)) in ranks.items()}
    assert extra[1] > 0
    assert extra == {rank: rank * extra[1] for rank in ranks}
    assert 50 * extra[4] < full[1][0] - full[0][0]
    assert all(private == plain for (_, plain), (_, private) in ranks.values())  # no activation of a frozen layer
    assert ranks[4][1][1] < full[1][1]
