"""Small networks, and the user's own."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpshard.applications import user_code
from dpshard.applications.cli import console
from dpshard.applications.cli.data import PAD, VOCABULARY, Data, Kind
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.extras import require
from dpshard.applications.tabular import make_network
from dpshard.applications.transformer import GPT, Block, ViT
from dpshard.backends.ranks import Ranks
from dpshard.errors import ConfigurationError
from dpshard.replacements import replace_unsupported

FITTING = {kind: ["mlp", "linear"] for kind in (Kind.FEATURES, Kind.NUMBERS)} | {Kind.IMAGE: ["mlp", "cnn", "vit"]}
FITTING |= {Kind.TEXT: ["text"], Kind.LANGUAGE: ["gpt", "gpt2"], Kind.MASKED: ["bert"]}
"""Models by kind of data."""


def build(name: str, data: Data, settings: TrainSettings) -> nn.Module:
    """Build a model with logits [B, classes], or [B, T, classes] of tokens."""
    if user_code.is_path(name):
        model = user_code.load(name)(tuple(data.example().shape), data.classes)
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model={name!r} returned {type(model).__name__}, not a torch.nn.Module.")
        _require_logits(name, model, data)
        _replace_unsupported(model, told_to=settings.replace_unsupported)
        return model
    require_fits(name, data)
    shape, length = tuple(data.example().shape), settings.max_length
    if data.kind in (Kind.FEATURES, Kind.NUMBERS):
        return make_network(name, math.prod(shape), data.numbers, data.classes)
    builders: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: MLP(math.prod(shape), data.classes),
        "cnn": lambda: CNN(shape[0], data.classes),
        "vit": lambda: VisionTransformer(shape, data.classes),
        "text": lambda: TextClassifier(length + 1, data.classes),
        "bert": lambda: TransformersModel(name, length + 1, data.classes),
        "gpt": lambda: gpt(length),
        "gpt2": lambda: TransformersModel(name, length, VOCABULARY),
    }
    return builders[name]()


def require_fits(name: str, data: Data) -> None:
    """Raise ConfigurationError unless the model `name` fits this kind of data."""
    if name not in FITTING[data.kind] and not user_code.is_path(name):
        raise ConfigurationError(
            f"model={name!r} does not fit these data ({data.sample}); choose one of {['auto', *FITTING[data.kind]]}."
        )


def _replace_unsupported(model: nn.Module, *, told_to: bool) -> None:
    replaced = replace_unsupported(model if told_to else copy.deepcopy(model))
    listed = "; ".join(f"{name or 'the model'}: {what}" for name, what in replaced.items())
    if replaced and not told_to:
        raise ConfigurationError(
            f"The model has layers that mix the samples of a batch, or keep statistics of them, so no per-sample "
            f"gradient exists. --replace-unsupported replaces them ({listed}); or build the model without them."
        )
    if replaced:
        console.out.print(f"Replaced {listed}")


def require_equal(model: nn.Module, name: str, ranks: Ranks) -> None:
    """Raise ConfigurationError on all ranks unless `model` has equal values on all."""
    digest = hashlib.sha256()
    for x in model.state_dict().values():
        digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if len(set(ranks.gather(digest.hexdigest()))) > 1:
        raise ConfigurationError(
            f"model={name!r} returned different weights on different ranks. Draw them from torch's generator, which "
            f"--seed seeds, or read them from one file."
        )


def _require_logits(name: str, model: nn.Module, data: Data) -> None:
    x = torch.stack([torch.as_tensor(data.example())] * 2)
    model.eval()
    with torch.no_grad():
        logits = model(x)
    model.train()
    expected = (2, *x.shape[1:], data.classes) if data.kind in (Kind.LANGUAGE, Kind.MASKED) else (2, data.classes)
    found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != expected:
        raise ConfigurationError(
            f"model={name!r}: for two samples, x {tuple(x.shape)}, the model returned {found}; it must return the "
            f"logits, {expected}. Wrap the model in a module that returns only its logits."
        )


def choose(data: Data, task: str) -> str:
    """Return the model for `auto`."""
    if data.kind is Kind.IMAGE and task == "data":
        return "cnn"  # the MLP drops brightness and contrast
    if data.kind is not Kind.LANGUAGE:
        return FITTING[data.kind][0]
    try:
        require("transformers", "hf", "model='gpt2'")
        return "gpt2"
    except ConfigurationError:
        return "gpt"


def gpt(length: int, width: int = 64, depth: int = 2, heads: int = 4) -> GPT:
    """Return a small GPT over bytes."""
    return GPT(VOCABULARY, length, width, depth, lambda: Block(width, heads, causal=True))


class MLP(nn.Module):
    """Two layers with a cosine between, on images without their brightness and contrast.

    The first starts as random Fourier features (Rahimi and Recht 2007), which suit few noisy steps.
    """

    def __init__(self, features: int, classes: int, width: int = 512) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.hidden.weight, std=1.7)
        nn.init.uniform_(self.hidden.bias, 0, 2 * math.pi)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of x [B, ...]."""
        x_BD = x.flatten(1)
        x_BD = F.normalize(x_BD - x_BD.mean(1, keepdim=True), dim=1)  # by each image's own mean and norm
        return self.head(torch.cos(self.hidden(x_BD)))


class CNN(nn.Module):
    """Three convolutions, with GroupNorm because BatchNorm mixes samples."""

    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for d_in, d_out, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2)):
            layers += [nn.Conv2d(d_in, d_out, 3, stride, padding=1), nn.GroupNorm(8, d_out), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(8 * width, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.body(2 * x_BCHW - 1))


class VisionTransformer(ViT):
    """A small vision transformer, whose head reads all tokens."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        patch = max(2, shape[1] // 8)
        super().__init__(shape[0], (shape[1], shape[2]), patch, width, depth, lambda: Block(width, heads))
        # Few noisy steps do not train attention to fill the class token.
        self.head = nn.Linear(self.positions[0].numel(), classes)
        nn.init.zeros_(self.head.weight)
        # Positions as large as patches, because few noisy steps cannot learn to distinguish them.
        nn.init.normal_(self.positions)
        with torch.no_grad():
            self.patches.weight.mul_(4)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.head(self.hidden(2 * x_BCHW - 1).flatten(1))


class TransformersModel(nn.Module):
    """Small, untrained GPT-2 or BERT of transformers, with tied embeddings."""

    def __init__(self, name: str, length: int, vocabulary: int) -> None:
        super().__init__()
        require("transformers", "hf", f"model={name!r}" + (" (model='gpt' does not)" if name == "gpt2" else ""))
        import transformers

        facts: dict[str, Any] = dict.fromkeys(_DROPOUTS[name], 0.0) | {"vocab_size": vocabulary}
        facts |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        facts |= {"max_position_embeddings": length, "bos_token_id": PAD, "eos_token_id": PAD}
        if name == "bert":
            facts |= {"intermediate_size": 256, "pad_token_id": PAD, "type_vocab_size": 1}
        of_task = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
        self.lm = of_task.from_config(transformers.AutoConfig.for_model(name, **facts))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary]: of the next token by GPT-2, of the same positions by BERT."""
        masked = self.lm.config.model_type == "bert"
        more = {"attention_mask": (ids_BT != PAD).long()} if masked else {"use_cache": False}
        return self.lm(input_ids=ids_BT, **more).logits


_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


class TextClassifier(nn.Module):
    """A bidirectional transformer over bytes; the head reads the mean without padding."""

    def __init__(self, length: int, classes: int, width: int = 64, depth: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        attend_BT = ids_BT != PAD
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD, attend_BT)
        weight_BT1 = (attend_BT / attend_BT.sum(1, keepdim=True)).unsqueeze(2)
        return self.head((self.norm(x_BTD) * weight_BT1).sum(1))
