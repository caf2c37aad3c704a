"""Settings of `dpshard plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dpshard.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Settings of a plan; options.yaml says what each means."""

    model: str = "gpt-100b"
    micro_batch: int = 1
    micro_batches: int = 1
    seq: int | None = None
    checkpointing: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    clipping: list[str] | None = field(default=None, metadata={"metavar": "STYLE[:MODE]"})

    ranks: int = 256
    shard: Literal["ddp", "zero2", "fsdp2", "hsdp"] = "fsdp2"
    node: int = 8
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpu_memory: float | None = None

    gpu: Literal["a100", "a100-40", "h100", "h200", "b200"] = "h100"
    mfu: float = 0.45
    intra: float = 450.0
    inter: float = 50.0
    pcie: float = 50.0
    latency: float = 20.0

    batch_size: int | None = None
    sample_size: int | None = None
    steps: int | None = None
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    target_delta: float = 1e-5
    budget: str | None = field(default=None, metadata={"metavar": "epsilon=E,delta=D,gpu-hours=H,dataset=N"})

    def __post_init__(self) -> None:
        run = (self.batch_size, self.sample_size, self.steps)
        if any(run) and not all(run):
            raise ConfigurationError("A run needs --batch-size, --sample-size and --steps. Give all three, or none.")
        if all(run) and (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError("A run needs either --target-epsilon or --noise-multiplier.")
        if self.pp != 1 and any(run):
            raise ConfigurationError("A whole run is not planned with --pp. Leave --batch-size and the others out.")

    @property
    def setup(self) -> dict[str, Any]:
        """The fields of a planner's Setup."""
        names = ("model", "ranks", "shard", "node", "micro_batches", "seq", "checkpointing", "precision", "optimizer")
        return {name: getattr(self, name) for name in (*names, "tp", "cp")}
