"""Settings of `dpshard plan`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dpshard.applications.cli.formats import field_of_option
from dpshard.errors import ConfigurationError

_step = partial(field_of_option, panel="The step")
_ranks = partial(field_of_option, panel="Ranks")
_time = partial(field_of_option, panel="Time")
_run = partial(field_of_option, panel="A whole run")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Settings of a plan; the help texts are those of `dpshard plan --help`."""

    model: str = _step(
        "gpt-100b",
        "gpt2-xl, gpt-26b, gpt-100b, gpt-1t, vit-g, vit-10b, vaultgemma-1b, or hf:NAME_OR_PATH, a transformers "
        "configuration (name, folder, or config.json).",
    )
    micro_batch: int = _step(1, "Samples of a rank in one forward.")
    micro_batches: int = _step(1, "Micro-batches of a rank in one step.")
    seq: int | None = _step(None, "Tokens of a sample (pixels along a side); by default the model's.")
    checkpointing: bool = _step(False, "Recompute activations in backward.")
    precision: Literal["bf16", "fp32"] = _step("bf16", "Of forward and backward; reduction and update are float32.")
    optimizer: Literal["adamw", "sgd"] = _step("adamw", "Optimizer with its states.")
    clipping: list[str] | None = _step(  # noqa: RUF009
        None,
        "all-layer, block-wise, layer-wise or param-wise, with a clipping mode (mixed-ghost: two passes); may be "
        "repeated. By default several.",
        metavar="STYLE[:MODE]",
    )
    ranks: int = _ranks(256, "Number of GPUs.")
    shard: Literal["ddp", "zero2", "fsdp2", "hsdp"] = _ranks(
        "fsdp2",
        "ddp: no shards (stage 0); zero2: FSDP2 that keeps parameters gathered until backward; fsdp2: shards of "
        "everything (stage 3); hsdp: shards within a node, replicated over nodes.",
    )
    node: int = _ranks(8, "GPUs of a node, the shards of hsdp.")
    tp: int = _ranks(1, "Ranks of tensor and sequence parallelism, under fsdp2 or zero2; with --pp under ddp.")
    cp: int = _ranks(1, "Ranks of context parallelism, under fsdp2 or zero2.")
    pp: int = _ranks(1, "Stages of a pipeline, under ddp and 1F1B; --micro-batches are its parts.")
    gpu_memory: float | None = _ranks(
        None, "GiB of a GPU: adds the styles that fit, and the largest micro-batches with their speed."
    )
    gpu: Literal["a100", "a100-40", "h100", "h200", "b200"] = _time("h100", "The kind of GPU.")
    mfu: float = _time(0.45, "Share of the GPU's peak that products reach, without waits for the network.")
    intra: float = _time(450.0, "GB/s of a GPU within its node.")
    inter: float = _time(50.0, "GB/s of a GPU to other nodes.")
    pcie: float = _time(50.0, "GB/s of a GPU to the host's memory.")
    latency: float = _time(20.0, "Microseconds of a collective for each doubling of its ranks.")
    batch_size: int | None = _run(None, "Expected logical batch size of a run, whose cost is added.")
    sample_size: int | None = _run(None, "Samples of the data set.")
    steps: int | None = _run(None, "Steps of the run.")
    target_epsilon: float | None = _run(None, "Epsilon of the run; or give --noise-multiplier.")
    noise_multiplier: float | None = _run(None, "Noise multiplier of the run.")
    target_delta: float = _run(1e-5, "Delta of the run.")
    budget: str | None = _run(
        None,
        "Instead of a step: the batches, steps and noise that a budget buys, for models of several sizes.",
        metavar="epsilon=E,delta=D,gpu-hours=H,dataset=N",
    )

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
