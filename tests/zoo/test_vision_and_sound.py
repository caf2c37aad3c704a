"""Vision and audio models of transformers, tiny and random, all parameters trainable: exact, untouched."""

import pytest
import torch

from tests.grids import chosen
from tests.zoo.zoo import NO_DROPOUT, SIZES, TOKENS, VOCABULARY, B, assert_model_exact, images, tokens

transformers = pytest.importorskip("transformers")

PATCHES = {**SIZES, **NO_DROPOUT, "image_size": 8, "patch_size": 4}


def classifier(name, configuration, head="ForImageClassification"):
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**configuration))


IMAGE_MODELS = {
    "ViT": (lambda: classifier("ViT", PATCHES), 8),
    "DeiT": (lambda: classifier("DeiT", PATCHES, "ForImageClassificationWithTeacher"), 8),
    "BEiT, biases per layer": (
        lambda: classifier("Beit", {**PATCHES, "drop_path_rate": 0.0, "use_relative_position_bias": True}),
        8,
    ),
    "BEiT, biases shared": (
        lambda: classifier(
            "Beit",
            {
                **PATCHES,
                "drop_path_rate": 0.0,
                "use_shared_relative_position_bias": True,
                "use_absolute_position_embeddings": True,
            },
        ),
        8,
    ),
    "Swin": (
        lambda: classifier(
            "Swin",
            {
                **NO_DROPOUT,
                "image_size": 16,
                "patch_size": 2,
                "embed_dim": 4,
                "depths": [2, 1],
                "num_heads": [2, 2],
                "window_size": 2,
                "mlp_ratio": 2.0,
                "drop_path_rate": 0.0,
            },
        ),
        16,
    ),
    "ConvNeXt": (
        lambda: classifier("ConvNext", {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}),
        16,
    ),
}


@pytest.mark.parametrize("name", chosen(IMAGE_MODELS, "ViT", "BEiT, biases per layer"))
def test_images(name):
    build, size = IMAGE_MODELS[name]
    assert_model_exact(build(), {"pixel_values": images(size)})


def test_clip_sees():
    configuration = transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4, projection_dim=6)
    model = transformers.CLIPVisionModelWithProjection(configuration)
    assert_model_exact(model, {"pixel_values": images()}, lambda output: output.image_embeds)


def test_clip_reads():
    configuration = transformers.CLIPTextConfig(
        **{**SIZES, **TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "projection_dim": 6}
    )
    ids = tokens()
    ids[0, 2] = ids[1, 4] = ids[2, 3] = 2  # the embedding at the end of a text is read
    model = transformers.CLIPTextModelWithProjection(configuration)
    assert_model_exact(model, {"input_ids": ids}, lambda output: output.text_embeds)


@pytest.mark.parametrize("norm", chosen(["layer", "group"], "layer"))
def test_wav2vec2(norm):
    names = ("hidden", "attention", "activation", "feat_proj", "final")
    configuration = transformers.Wav2Vec2Config(
        **{**SIZES, **{f"{name}_dropout": 0.0 for name in names}, "vocab_size": 6, "feat_extract_norm": norm},
        conv_dim=[4, 4],
        conv_kernel=[4, 3],
        conv_stride=[3, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        mask_time_prob=0.0,
    )
    assert_model_exact(transformers.Wav2Vec2ForCTC(configuration), {"input_values": torch.randn(B, 60)})


@pytest.mark.exhaustive
def test_whisper():
    sides = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    configuration = transformers.WhisperConfig(
        **{**TOKENS, **sides, "vocab_size": VOCABULARY, "num_mel_bins": 4, "d_model": 8, "decoder_start_token_id": 1},
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_source_positions=6,
        max_target_positions=8,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = transformers.WhisperForConditionalGeneration(configuration)
    assert_model_exact(model, {"input_features": torch.randn(B, 4, 12), "decoder_input_ids": tokens(4)})
