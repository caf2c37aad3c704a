"""timm's models, tiny and random, all parameters trainable: exact, untouched."""

from functools import partial

import pytest
import torch

from tests.grids import chosen
from tests.zoo.beside import import_timm
from tests.zoo.zoo import assert_model_exact, images

timm = import_timm()

from timm.layers import GroupNorm  # noqa: E402
from timm.models.cait import Cait  # noqa: E402
from timm.models.convnext import ConvNeXt  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.nfnet import NfCfg, NormFreeNet  # noqa: E402
from timm.models.resnet import BasicBlock, Bottleneck, ResNet  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

PATCHES = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
STAGES = {"depths": (1, 1, 1, 1), "dims": (4, 4, 8, 8), "num_classes": 3}
GROUPS = {"stem_width": 4, "num_classes": 3, "norm_layer": partial(GroupNorm, num_groups=2)}
# Convolutions of every stage standardise their weights, by the batch normalisation of a weight.
NO_NORM = {"depths": (1, 1), "channels": (8, 16), "stem_type": "3x3", "stem_chs": 8, "num_features": 16}


def distilled():
    model = VisionTransformerDistilled(**PATCHES)
    model.set_distilled_training(True)
    return model


def squeezed():
    gates = {"attn_layer": "se", "attn_kwargs": {"rd_ratio": 0.5}}
    return NormFreeNet(NfCfg(**NO_NORM, group_size=8, **gates), num_classes=3)


MODELS = {
    "ViT": (lambda: VisionTransformer(**PATCHES), 8),
    "ViT, registers, normed queries, pooled": (
        lambda: VisionTransformer(**PATCHES, reg_tokens=2, qk_norm=True, global_pool="avg", class_token=False),
        8,
    ),
    "DeiT3": (lambda: VisionTransformer(**PATCHES, no_embed_class=True, init_values=0.1), 8),
    "DeiT, distilled": (distilled, 8),
    "CaiT": (lambda: Cait(**PATCHES, depth_token_only=1), 8),
    "ConvNeXt": (lambda: ConvNeXt(**STAGES), 32),
    "ConvNeXt V2": (lambda: ConvNeXt(**STAGES, use_grn=True, ls_init_value=None), 32),
    "NFNet": (squeezed, 16),
    "NF-ResNet": (lambda: NormFreeNet(NfCfg(**NO_NORM), num_classes=3), 16),
    "ResNet, GroupNorm": (lambda: ResNet(BasicBlock, (1, 1, 1, 1), channels=(4, 4, 8, 8), **GROUPS), 32),
    "ResNet, bottlenecks, GroupNorm": (lambda: ResNet(Bottleneck, (1, 1, 1, 1), channels=(4, 4, 4, 4), **GROUPS), 32),
}


@pytest.mark.parametrize("name", chosen(MODELS, "ViT", "ConvNeXt", "NFNet"))
def test_timm(name):
    build, size = MODELS[name]
    assert_model_exact(
        build(), {"x": images(size)}, lambda output: torch.cat(output, 1) if isinstance(output, tuple) else output
    )
