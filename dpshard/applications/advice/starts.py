"""Where runs start, with sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["tabular", "vision", "language"]
OptimizerName = Literal["sgd", "adam", "adamw"]

DE = "De et al. 2022, arXiv:2204.13650"
LI = "Li et al. 2022, arXiv:2110.05679"
BU = "Bu et al. 2022, arXiv:2206.07136"
MCKENNA = "McKenna et al. 2025, arXiv:2501.18914"
PAPERNOT = "Papernot and Steinke 2022, arXiv:2110.03620"
SWEEP = "ours, benchmarks/results/advice-sweep.json"
SWEEP_OF_TEXTS = "ours, benchmarks/results/advice-sweep-language.json"
DEFAULT = "ours, the default of `dpshard train`"
ACCOUNTANT = "the accountant pld"


@dataclass(frozen=True, slots=True)
class Reason:
    """A choice and its reason."""

    what: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Settings of a kind of run."""

    models: tuple[str, ...]
    steps: int
    relative_noise: float
    """Largest noise per batch, over that of a batch of all samples."""
    optimizer: OptimizerName
    learning_rate: float
    momentum: float = 0.0
    lr_schedule: Literal["cosine", "constant"]
    trains: str
    reasons: tuple[Reason, ...]
    next_steps: tuple[str, ...]


_NOISE_OF_DE = Reason(
    "noise",
    "their noise per batch is at most 1.05 times that of a batch of all samples, by our accountant "
    "(CIFAR-10 1.01, ImageNet 1.05)",
    DE,
)
_NOISE_OF_LI = Reason(
    "noise",
    "their noise per batch is 1.4 (MNLI) to 2.6 (SST-2) times that of a batch of all samples, by our "
    "accountant; 2 lies between",
    LI,
)
_SMALLER = f"A smaller model: private training suits fewer parameters and more samples per step ({MCKENNA})."

STARTS: dict[tuple[Task, bool], Start] = {
    ("tabular", False): Start(
        models=("mlp",),
        steps=300,
        relative_noise=1.05,
        optimizer="adamw",
        learning_rate=0.03,
        lr_schedule="cosine",
        trains="all parameters of a small network",
        reasons=(
            _NOISE_OF_DE,
            Reason("steps", "300 steps are right 1.8% more often than 100 on our tables, with AdamW", SWEEP),
            Reason("optimizer", "AdamW with a cosine: 82.0% on our tables, SGD with momentum at most 80.5%", SWEEP),
            Reason("learning rate", "0.03 beats 0.01 on our tables; larger ones were not tried", SWEEP),
            Reason("trains", "public weights of tables are rare", DEFAULT),
        ),
        next_steps=(
            "Name public bounds of columns (`--columns`); private ones cost a part of the budget.",
            "SGD with momentum 0.9 at a learning rate of 0.3, in a search that you account for.",
        ),
    ),
    ("vision", False): Start(
        models=("cnn",),
        steps=875,
        relative_noise=1.05,
        optimizer="sgd",
        learning_rate=2.0,
        lr_schedule="constant",
        trains="all parameters, with GroupNorm in the place of BatchNorm",
        reasons=(
            _NOISE_OF_DE,
            Reason("steps", "875 on CIFAR-10 at epsilon 1 (725 in later versions of their configuration)", DE),
            Reason("optimizer", "SGD without momentum, at a constant learning rate", DE),
            Reason("learning rate", "2 at a clipping norm of 1, on CIFAR-10 at epsilon 1", DE),
            Reason("trains", "BatchNorm mixes samples, GroupNorm does not", DE),
        ),
        next_steps=(
            f"16 views of an image as one unit: `dpshard.augment(dataset, transform, 16)`, `rows_per_unit=16` ({DE}).",
            f"The average of the weights over the steps, `dpshard.recipes.WeightAverage`: free ({DE}).",
            f"Public weights: --pretrained ({DE}).",
        ),
    ),
    ("vision", True): Start(
        models=(),
        steps=250,
        relative_noise=1.05,
        optimizer="sgd",
        learning_rate=1.0,
        lr_schedule="constant",
        trains="all parameters, with a new head",
        reasons=(
            _NOISE_OF_DE,
            Reason("steps", "250 for CIFAR-100 from ImageNet weights at epsilon 1", DE),
            Reason("optimizer", "SGD without momentum, at a constant learning rate", DE),
            Reason("learning rate", "1 at a clipping norm of 1, for CIFAR-100 at epsilon 1", DE),
            Reason("trains", "their configuration trains every layer and resets the head", DE),
        ),
        next_steps=(
            f"16 views of an image as one unit: `dpshard.augment(dataset, transform, 16)`, `rows_per_unit=16` ({DE}).",
            "Only the head, or LoRA: fewer trained parameters, less memory.",
        ),
    ),
    ("language", False): Start(
        models=("text", "gpt"),
        steps=400,
        relative_noise=1.05,
        optimizer="adam",
        learning_rate=0.01,
        lr_schedule="cosine",
        trains="all parameters of a small transformer",
        reasons=(
            Reason(
                "noise",
                "from scratch, loss falls with sigma/batch, so batches are far larger than without privacy. Past 1.05 "
                "(De et al.'s) they gain little; at 2.0 perplexity on our texts is 17% higher",
                f"{MCKENNA}; {LI}; {DE}; {SWEEP_OF_TEXTS}",
            ),
            Reason("steps", "410 on E2E (GPT-2); on our texts 300 beat 100 with Adam", f"{LI}; {SWEEP_OF_TEXTS}"),
            Reason("optimizer", "Adam with a falling learning rate (theirs falls linearly)", LI),
            Reason(
                "learning rate",
                "large batches take large rates (Li et al.); perplexity on our texts, epsilon 3, is 13.9 by 0.01, 13.6 "
                "by 0.03, 20.5 by 0.003",
                f"{LI}; {SWEEP_OF_TEXTS}",
            ),
            Reason("trains", "without public weights nothing can stay fixed", DEFAULT),
        ),
        next_steps=(f"Public weights, which matter most for text: --pretrained ({LI}).", _SMALLER),
    ),
    ("language", True): Start(
        models=(),
        steps=400,
        relative_noise=2.0,
        optimizer="adam",
        learning_rate=5e-4,
        lr_schedule="cosine",
        trains="all parameters",
        reasons=(
            _NOISE_OF_LI,
            Reason("steps", "410 on E2E (GPT-2); they take about as many elsewhere", LI),
            Reason("optimizer", "Adam with a falling learning rate (theirs falls linearly)", LI),
            Reason("learning rate", "5e-4 to classify with RoBERTa; 2e-3 to generate with GPT-2", LI),
            Reason("trains", "pre-trained models do not suffer from their dimension", LI),
        ),
        next_steps=(
            "Learning rate 2e-3 to generate text, in a search that you account for.",
            "LoRA (docs/integrations.md) where memory is short.",
        ),
    ),
}
"""De et al. give theirs in jax-privacy, Li et al. in private-transformers."""
