"""Models of the planner, of fake parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpshard.applications.extras import require
from dpshard.applications.transformer import GPT, Block, ViT
from dpshard.config import require_choice
from dpshard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model of fake parameters, with inputs and loss."""

    model: nn.Module
    blocks: list[nn.Module]
    inputs: Callable[[int], tuple[dict[str, Tensor], Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A GPT, or a ViT with patches."""

    width: int
    layers: int
    heads: int
    hidden: int | None = None
    """Of the MLP; None: 4 * width."""
    vocabulary: int = 50257
    seq: int = 2048
    """Tokens; pixels along a side."""
    patch: int | None = None
    tied: bool = False

    def build(self, *, seq: int | None, checkpointing: bool) -> FakeModel:
        """Build the model."""
        length, block = seq or self.seq, self.block(checkpointing=checkpointing)
        if self.patch is None:
            model = GPT(self.vocabulary, length, self.width, self.layers, block, head=not self.tied)
        else:
            model = _ViT(self, self.patch, length, block)

        def inputs(batch: int) -> tuple[dict[str, Tensor], Tensor]:
            if self.patch:
                return {"x": torch.empty(batch, 3, length, length)}, torch.zeros(batch, dtype=torch.int64)
            ids_BT = torch.zeros(batch, length, dtype=torch.int64)
            return {"x": ids_BT}, ids_BT

        return FakeModel(model, list(model.blocks), inputs, cross_entropy)

    def block(self, *, checkpointing: bool) -> Callable[[], Block]:
        """Return what makes a block."""
        kind = _Checkpointed if checkpointing else Block
        return partial(kind, self.width, self.heads, causal=self.patch is None, hidden=self.hidden)


PRESETS: dict[str, Transformer] = {
    "gpt2-xl": Transformer(width=1600, layers=48, heads=25, seq=1024, tied=True),
    "gpt-26b": Transformer(width=6656, layers=48, heads=52),
    "gpt-100b": Transformer(width=10240, layers=80, heads=80),
    "gpt-1t": Transformer(width=25600, layers=128, heads=160, vocabulary=51200),
    "vit-g": Transformer(width=1664, layers=48, heads=16, hidden=8192, vocabulary=1000, seq=224, patch=14),
    "vit-10b": Transformer(width=6336, layers=21, heads=48, vocabulary=1000, seq=224, patch=14),
}
"""Models of Bu et al. 2023, arXiv:2311.11822, Sec. 4 and App. D, and gpt-1t of Narayanan et al. 2021, arXiv:2104.04473.
"""


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vaultgemma-1b": {
        "model_type": "vaultgemma",
        "vocab_size": 256_000,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 1024,
        "layer_types": ["full_attention"] * 26,
    },
}


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Return the mean loss of logits."""
    scores = getattr(output, "logits", output)
    return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


class _Checkpointed(Block):
    def forward(self, x_BTD: Tensor, attend_BT: Tensor | None = None) -> Tensor:
        return checkpoint(super().forward, x_BTD, use_reentrant=False, preserve_rng_state=False)


class _ViT(ViT):
    def __init__(self, shape: Transformer, patch: int, pixels: int, block: Callable[[], Block]) -> None:
        super().__init__(3, (pixels, pixels), patch, shape.width, shape.layers, block)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)[:, 0])


def build(name: str, *, seq: int | None, checkpointing: bool) -> FakeModel:
    """Build a preset, or a transformers configuration hf:NAME_OR_PATH (name, folder, or JSON).

    Raises ConfigurationError.
    """
    if name.startswith("hf:") or name in CONFIGURATIONS:
        return _from_transformers(name, seq, checkpointing)
    require_choice("model", name, [*PRESETS, *CONFIGURATIONS, "hf:NAME_OR_PATH"])
    return PRESETS[name].build(seq=seq, checkpointing=checkpointing)


def _from_transformers(name: str, seq: int | None, checkpointing: bool) -> FakeModel:
    require("transformers", "hf", f"model={name!r}")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = name.removeprefix("hf:")
    try:
        if name in CONFIGURATIONS or Path(path).is_file():
            fields = dict(CONFIGURATIONS.get(name) or json.loads(Path(path).read_text("utf-8")))
            config = AutoConfig.for_model(fields.pop("model_type", ""), **fields)
        else:
            config = AutoConfig.from_pretrained(path)
        text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        model = (AutoModelForCausalLM if text else AutoModelForImageClassification).from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{name}: cannot build a causal language model or an image classifier from it ({error})."
        ) from error
    blocks = _largest_list(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if text:
        limit = getattr(config, "max_position_embeddings", None)
        length = seq or min(2048, limit or 2048)
        if limit is not None and length > limit:
            raise ConfigurationError(f"seq={length}: {name} has {limit} positions; choose --seq at most {limit}.")
    else:
        length = config.image_size

    def inputs(batch: int) -> tuple[dict[str, Any], Tensor]:
        if not text:
            pixels = torch.empty(batch, config.num_channels, length, length)
            return {"pixel_values": pixels}, torch.zeros(batch, dtype=torch.int64)
        ids_BT = torch.zeros(batch, length, dtype=torch.int64)
        return {"input_ids": ids_BT, "use_cache": False}, ids_BT

    return FakeModel(model.train(), blocks, inputs, cross_entropy)


def _largest_list(model: nn.Module) -> list[nn.Module]:
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ConfigurationError(f"{type(model).__name__} has no ModuleList of blocks to shard one by one.")
    return max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))
