"""Opacus's settings in terms of dpshard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpshard.config import LossReduction
from dpshard.errors import ConfigurationError

_MODES = {"hooks": "auto", "functorch": "auto", "ew": "auto", "ghost": "mixed-ghost", "ghost_fsdp": "auto"}
"""dpshard's clipping mode for each grad_sample_mode of Opacus; modes differ only in cost."""


@dataclass(frozen=True, slots=True)
class ClippingSettings:
    """Clipping settings. Raises ConfigurationError for an unknown `grad_sample_mode`."""

    max_grad_norm: float | Sequence[float]
    clipping: str
    loss_reduction: LossReduction
    grad_sample_mode: str

    def __post_init__(self) -> None:
        if self.grad_sample_mode not in _MODES:
            raise ConfigurationError(
                f"grad_sample_mode={self.grad_sample_mode!r}: choose one of {list(_MODES)}. dpshard computes the "
                f"gradients; there is no p.grad_sample to fill."
            )

    @property
    def mode(self) -> str:
        """Clipping mode of dpshard."""
        return _MODES[self.grad_sample_mode]

    @property
    def ghost(self) -> bool:
        """True if `make_private` returns a criterion."""
        return self.grad_sample_mode.startswith("ghost")

    def style_and_norm(self, module: nn.Module) -> tuple[Any, float]:
        """Return dpshard's clipping style and norm."""
        norm = self.max_grad_norm
        if self.clipping == "flat" and isinstance(norm, (int, float)):
            return "all-layer", float(norm)
        if self.clipping == "per_layer" and isinstance(norm, Sequence):
            norms = [float(x) for x in norm]
            count = sum(p.requires_grad for p in module.parameters())
            if len(norms) == count and math.isclose(min(norms), max(norms)):
                return "param-wise", math.sqrt(sum(x * x for x in norms))
            raise ConfigurationError(
                f"clipping='per_layer' takes one norm for each of the {count} trainable parameters, all equal: "
                f"max_grad_norm=[R / sqrt({count})] * {count}, for a total of R."
            )
        raise ConfigurationError(
            f"clipping={self.clipping!r} with max_grad_norm={norm!r}: give 'flat' with a number, or 'per_layer' with "
            f"a list of equal numbers. Adaptive clipping is not supported; dpshard's own clipping_fn='automatic' "
            f"needs no tuned norm."
        )


def refuse_unaccounted(*, batch_first: bool, noise_generator: Any) -> None:
    """Raise ConfigurationError for settings that cannot be accounted."""
    if not batch_first:
        raise ConfigurationError(
            "batch_first=False: let the data set give samples in dimension 0, and transpose in the model's forward. "
            "(Layers with batch_first=False, such as nn.LSTM's default, work within it.)"
        )
    if noise_generator is not None:
        raise ConfigurationError(
            "noise_generator would make the noise predictable to everyone with its seed. Leave it out: noise "
            "comes from a secret of the run, and save_checkpoint makes a run repeatable."
        )
