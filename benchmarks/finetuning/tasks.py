"""The tasks, and their scales.

text: Python's language reference is public, a docstring of the standard library is a private sample, all in tokens of
a vocabulary from the public text. digits: 0 to 4 are public (and moved by a pixel), 5 to 9 are private.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, ViTConfig, ViTForImageClassification

IGNORED = -100
"""The label of positions that are not predicted."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of models and runs."""

    width: int
    layers: int
    vocabulary: int
    length: int
    files: int | None
    """Number of files of the standard library; None: all."""
    text: tuple[int, int, int, int]
    """Steps on public inputs, by 64; steps on private ones; rows of a micro-batch, of all processes; number of these
    in an expected batch."""
    digits: tuple[int, int, int, int]
    privacy: dict[str, float]


FULL = Scale(
    width=192,
    layers=4,
    vocabulary=2048,
    length=64,
    files=None,
    text=(150, 20, 128, 2),
    digits=(300, 30, 128, 4),
    privacy={"target_epsilon": 8.0, "target_delta": 1e-5},
)
QUICK = Scale(
    width=16,
    layers=1,
    vocabulary=300,
    length=16,
    files=12,
    text=(4, 2, 16, 1),
    digits=(4, 2, 64, 1),
    privacy={"noise_multiplier": 1.0, "target_delta": 1e-5},
)


class Rows(Dataset):
    """Tensors with a row per sample, by the names of a model's arguments."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and one protected sample."""

    name: str
    sample: str
    """Description of one protected sample."""
    model: PreTrainedModel
    """The model before any training."""
    begin: Callable[[PreTrainedModel], None]
    """Changes the model after training on public inputs, before fine-tuning."""
    public: Dataset
    private: Dataset
    held_out: Dataset
    block: str
    """The class of the model's blocks, which FSDP gathers one at a time."""
    lora: LoraConfig
    learning_rates: dict[str, float]
    privacy: dict[str, float]
    public_steps: int
    batches: tuple[int, int, int]


def text(scale: Scale) -> Task:
    end = "<|endoftext|>"
    public, private = end.join(topics[name] for name in sorted(topics)), docstrings(scale.files)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=scale.vocabulary, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), learner)

    T = scale.length
    stream = torch.tensor(tokenizer.encode(public).ids)
    blocks = stream[: len(stream) // T * T].view(-1, T)
    labels = torch.full((len(private), T), IGNORED)
    for row, encoded in zip(labels, tokenizer.encode_batch([end + x + end for x in private]), strict=True):
        ids = torch.tensor(encoded.ids[:T])
        row[: len(ids)] = ids
    train, held_out = divided(Rows(input_ids=labels.clamp(min=0), labels=labels), 1 / 10)
    config = GPT2Config(
        vocab_size=scale.vocabulary, n_positions=T, n_embd=scale.width, n_layer=scale.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return Task(
        name="GPT-2, text",
        sample="a docstring",
        model=GPT2LMHeadModel(config),
        begin=lambda model: None,
        public=Rows(input_ids=blocks, labels=blocks),
        private=train,
        held_out=held_out,
        block="GPT2Block",
        lora=LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        learning_rates={"all weights": 2e-3, "LoRA": 1e-2},
        privacy=scale.privacy,
        public_steps=scale.text[0],
        batches=scale.text[1:],
    )


def docstrings(files: int | None) -> list[str]:
    """Return the docstrings of the standard library, of modules, classes and functions, each once."""
    root, found = Path(sysconfig.get_path("stdlib")), dict[str, None]()
    others = {"test", "tests", "site-packages", "dist-packages", "pydoc_data"}
    paths = [path for path in sorted(root.rglob("*.py")) if not others & set(path.relative_to(root).parts)]
    for path in paths[:files]:
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a file for another version of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[ast.get_docstring(node) or ""] = None
    return [docstring for docstring in found if docstring]


def digits(scale: Scale) -> Task:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    low, high = y < 5, y >= 5
    moved = [x[low].roll(by, (2, 3)) for by in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))]
    train, held_out = divided(Rows(pixel_values=x[high], labels=y[high] - 5), 1 / 5)
    width = 2 * scale.width // 3
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=width, intermediate_size=2 * width, num_labels=5,
        num_hidden_layers=scale.layers, num_attention_heads=2, hidden_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip

    def new_head(model: PreTrainedModel) -> None:
        model.classifier = nn.Linear(width, 5)

    return Task(
        name="ViT, digits",
        sample="a handwritten digit",
        model=ViTForImageClassification(config),
        begin=new_head,
        public=Rows(pixel_values=torch.cat(moved), labels=y[low].repeat(len(moved))),
        private=train,
        held_out=held_out,
        block="ViTLayer",
        lora=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "fc1", "fc2"], modules_to_save=["classifier"]),
        learning_rates={"all weights": 3e-3, "LoRA": 1e-2},
        privacy=scale.privacy,
        public_steps=scale.digits[0],
        batches=scale.digits[1:],
    )


def divided(rows: Rows, fraction: float) -> tuple[Dataset, Dataset]:
    """Return training and held-out rows: the same in every run, each a multiple of 4 samples."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    count = round(len(rows) * fraction / 4) * 4
    return Subset(rows, order[count:]), Subset(rows, order[:count])
