"""Pre-training from scratch with published settings.

DP-BERT: Anil et al. 2021, arXiv:2108.01624, Table 1 and Sec. 5. VaultGemma: Sinha et al. 2025, arXiv:2510.15001.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpshard.config import is_count
from dpshard.errors import ConfigurationError
from dpshard.recipes.adam_bc import AdamBC
from dpshard.recipes.schedules import stepped_batches, warmup_quadratic_decay


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingRecipe:
    """Settings of a pre-training run, by default those of DP-BERT; change them with `dataclasses.replace`.

    Noise makes the weights before a LayerNorm grow, which shrinks their gradients. The large weight decay prevents
    this.
    """

    steps: int = 20_000
    """In optimizer steps."""
    warmup_steps: int = 7_500
    """Linear; then the learning rate falls quadratically to 0."""
    first_batch: int = 262_144
    """Samples of the first level."""
    last_batch: int = 1_048_576
    """Samples from the last level on."""
    levels: int = 5
    """Equally spaced sizes. Five draw 14.1% fewer samples than the last size throughout."""
    ramp_steps: int = 7_500
    """Steps of all levels together."""
    learning_rate: float = 6.0902e-4
    """At the end of warm-up."""
    betas: tuple[float, float] = (0.75, 0.9)
    """Decay of Adam's moments per step."""
    eps: float = 1e-11
    """Added to the root of the second moment; clipped gradients are thousandths."""
    weight_decay: float = 1.0
    """Each step multiplies weights by 1 - learning rate * lambda (decoupled)."""
    max_grad_norm: float = 3.2429e-3
    """Clipping norm C. Nearly every gradient exceeds it."""

    def engine_settings(self) -> dict[str, Any]:
        """Return settings for `PrivacyEngine`."""
        phases = stepped_batches(
            self.first_batch, self.last_batch, levels=self.levels, ramp_steps=self.ramp_steps, steps=self.steps
        )
        return {"batch_size": phases, "max_grad_norm": self.max_grad_norm, "clipping_fn": "abadi"}

    def optimizer(
        self, parameters: Iterable[nn.Parameter], *, noise_std: Callable[[], float] | None = None
    ) -> Optimizer:
        """Return AdamW, or with `noise_std` AdamBC."""
        settings: dict[str, Any] = {
            "lr": self.learning_rate,
            "betas": self.betas,
            "weight_decay": self.weight_decay,
        }
        if noise_std is not None:
            return AdamBC(parameters, noise_std=noise_std, **settings)
        return AdamW(parameters, eps=self.eps, **settings)

    def lr_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return the schedule of the learning rate."""
        return warmup_quadratic_decay(optimizer, warmup_steps=self.warmup_steps, steps=self.steps)

    def scaled(self, *, steps: int, last_batch: int) -> PretrainingRecipe:
        """Return the same recipe in `steps` steps, with batches up to `last_batch` samples.

        Raises ConfigurationError if the run is too short for the levels.
        """
        if not (is_count(steps) and is_count(last_batch)):
            raise ConfigurationError(f"steps={steps!r}, last_batch={last_batch!r}: both are positive ints.")
        ramp_steps = round(self.ramp_steps * steps / self.steps)
        if ramp_steps < self.levels:
            least = -(-self.levels * self.steps // self.ramp_steps)
            raise ConfigurationError(
                f"steps={steps}: {self.levels} levels of the batch size take {least} steps or more."
            )
        return replace(
            self,
            steps=steps,
            warmup_steps=round(self.warmup_steps * steps / self.steps),
            ramp_steps=ramp_steps,
            first_batch=max(1, round(self.first_batch * last_batch / self.last_batch)),
            last_batch=last_batch,
        )


DP_BERT = PretrainingRecipe()
"""Masked-language-model pre-training of BERT-Large on 346M pairs of sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRecipe:
    """Privacy settings of a language model's pre-training, by default those of VaultGemma.

    The unit of privacy is a sequence of tokens: a document that fills k sequences is protected k times less.
    """

    steps: int = 100_000
    """In optimizer steps."""
    batch_size: int = 517_989
    """Expected logical batch, in sequences of 1,024 tokens."""
    noise_multiplier: float = 0.614
    """Standard deviation of the noise over the clipping norm."""
    sample_size: int = 9_090_909_090
    """1 / delta, because the number is not published."""
    target_delta: float = 1.1e-10

    def engine_settings(self, *, truncated: bool = False) -> dict[str, Any]:
        """Return batch, steps, noise and delta for `PrivacyEngine`, with the data set's size.

        `truncated`: cap the logical batch, as VaultGemma did (neighbours replace a sequence).
        """
        names = ("batch_size", "steps", "noise_multiplier", "sample_size", "target_delta")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**settings, "max_batch_size": "auto"} if truncated else settings

    def scaled(self, *, sample_size: int, batch_size: int, steps: int) -> SequenceRecipe:
        """Return the same noise multiplier for a smaller run; delta becomes 1 / sample_size at most."""
        if not all(map(is_count, (sample_size, batch_size, steps))):
            raise ConfigurationError(f"{sample_size=!r}, {batch_size=!r}, {steps=!r}: all are positive ints.")
        delta = min(1e-5, 1 / sample_size)
        return replace(self, sample_size=sample_size, batch_size=batch_size, steps=steps, target_delta=delta)


VAULT_GEMMA = SequenceRecipe()
"""Pre-training of VaultGemma 1B."""
