"""Units of K rows over the zoo's families: the update is the oracle's, which takes the K rows of a unit alone."""

import functools

import pytest
import torch
from torch import nn

from dpshard.clipping.groups import STYLES, partition
from dpshard.config import CLIPPING_MODES
from tests.grids import covering
from tests.oracle import clipped_mean, norm, private_step, ramp_loss, relative_error
from tests.test_units import TOLERANCE, per_unit_gradients
from tests.zoo.test_language_models import DECODERS, TEXT, mixture
from tests.zoo.test_vision_and_sound import IMAGE_MODELS
from tests.zoo.zoo import NO_DROPOUT, TOKENS, VOCABULARY, Wide

transformers = pytest.importorskip("transformers")

M = 3
"""Units."""


def of(name, head, **configuration):
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**configuration))


def t5():
    sizes = {**TOKENS, "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    return of("T5", "ForConditionalGeneration", **sizes, dropout_rate=0.0, decoder_start_token_id=2)


def mamba():
    sizes = {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    return of("Mamba", "ForCausalLM", **sizes, time_step_rank=2, conv_kernel=3)


FAMILIES = {
    "GPT2": functools.partial(of, "GPT2", "LMHeadModel", **DECODERS["GPT2"]),
    "Llama": functools.partial(of, "Llama", "ForCausalLM", **DECODERS["Llama"]),
    "Rwkv": functools.partial(of, "Rwkv", "ForCausalLM", **DECODERS["Rwkv"]),
    "Bert": functools.partial(of, "Bert", "ForMaskedLM", **TEXT, **NO_DROPOUT),
    "Mixtral": functools.partial(mixture, "Mixtral"),
    "T5": t5,
    "Mamba": mamba,
    **{name: IMAGE_MODELS[name][0] for name in ("ViT", "BEiT, biases per layer", "ConvNeXt")},
}


class Logits(nn.Module):
    """The logits of a model of transformers; an encoder and decoder gets the same ids twice."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        more = {"decoder_input_ids": x[:, :4]} if self.model.config.is_encoder_decoder else {}
        return self.model(x, **more).logits


HOW = {
    **{mode: {"clipping_mode": mode} for mode in CLIPPING_MODES},
    **{style: {"clipping_style": style} for style in STYLES if style != "all-layer"},
    "layer-wise ghost": {"clipping_style": "layer-wise", "clipping_mode": "ghost"},
    "block-wise automatic": {"clipping_style": "block-wise", "clipping_fn": "automatic"},
}
ROWS = (1, 3, 16)


def cases():
    """Every family with every K, and with half of the ways, whose K goes round; each of the three is in a quick case.

    Half, because modes and styles know layers, not families: each way meets five families.
    """
    grid = [(name, K, "auto") for name in FAMILIES for K in ROWS]
    ways = [(i, j) for i in range(len(FAMILIES)) for j in range(len(HOW)) if (i + j) % 2 == 0]
    grid += [([*FAMILIES][i], ROWS[(i + j) % 3], [*HOW][j]) for i, j in ways]
    return covering(dict.fromkeys(grid), lambda *case: set(enumerate(case)))


@pytest.mark.parametrize(("name", "K", "how"), cases())
def test_units_of_k_rows(name, K, how):
    model = Logits(FAMILIES[name]()).double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of 0 and scales of 1 would hide that they are used
            parameter.add_(0.2 * torch.randn_like(parameter))
    if name in IMAGE_MODELS:
        size = IMAGE_MODELS[name][1]
        rows = torch.randn(M * K, 3, size, size, dtype=torch.float64)
    else:
        rows = torch.randint(3, VOCABULARY, (M * K, 5))
    options = HOW[how]
    names = [name for name, _ in model.named_parameters()]
    groups = [group.names for group in partition(model, options.get("clipping_style", "all-layer"), names, 1.0)]
    with Wide():
        per_unit = per_unit_gradients(model, (rows,), K, ramp_loss)
        R = sorted(norm(gradients) for gradients in per_unit)[M // 2] * 0.999  # clips some units
        fn = options.get("clipping_fn", "abadi")
        expected = clipped_mean(per_unit, max_grad_norm=R, batch_size=M, groups=groups, clipping_fn=fn)
        # BERT makes the same types of all tokens, whose order only the gradients of verification tell.
        options = {"batch_size": M, "max_grad_norm": R, "rows_per_unit": K, "verify": name == "Bert", **options}
        update = private_step(model, (rows,), ramp_loss, **options)
    assert relative_error(update, expected) <= TOLERANCE
