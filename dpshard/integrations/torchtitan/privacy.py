"""The section [privacy] of a config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from dpshard.config import AccountantName, NoiseName


@dataclass(kw_only=True, slots=True)
class Privacy:
    """Settings of `dpshard.PrivacyEngine`, and how documents fill rows."""

    target_epsilon: float | None = None
    """Budget of the run; calibrates the noise. Or give noise_multiplier."""
    target_delta: float = 1e-5
    """Well below 1 / number of documents."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise over the sensitivity."""
    max_grad_norm: float = 1.0
    """Largest L2 norm of a document's contribution."""
    clipping_fn: Literal["automatic", "abadi", "global"] = "automatic"
    clipping_style: Literal["all-layer", "layer-wise", "block-wise", "param-wise"] = "all-layer"
    """Parameters that share a norm. "block-wise" needs the least memory under FSDP."""
    clipping_mode: str = "auto"
    accountant: AccountantName = "pld"
    max_batch_size: int | None = None
    """Cap of the documents of a step (truncated Poisson)."""
    offload_records: bool = False
    secure_mode: bool = False
    noise: NoiseName = "gaussian"
    verify: bool = True
    documents_per_row: int = 1
    """Most documents in a row of seq_len tokens; above 1, attention must be "flex" or "varlen"."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of the engine."""
        settings = dataclasses.asdict(self)
        del settings["documents_per_row"]
        return settings
