"""torchtitan's Trainer with private training.

torchtitan's Trainer takes a mean over all tokens of a stream of rows. A PrivateTrainer draws documents. A step is a
logical batch; a document's loss is the mean over its tokens. All else is torchtitan's own. What would change or hide
gradients before the noise is refused by name.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from dpshard.engine import PrivacyEngine
from dpshard.errors import CheckpointError
from dpshard.integrations.torchtitan.checkpoints import EngineState
from dpshard.integrations.torchtitan.context import DocumentParts
from dpshard.integrations.torchtitan.documents import Documents, PaddedRows
from dpshard.integrations.torchtitan.model import prepared
from dpshard.integrations.torchtitan.privacy import Privacy
from dpshard.integrations.torchtitan.refusals import refuse_unsupported
from dpshard.integrations.torchtitan.stages import DocumentLosses, PipelinedDocuments
from dpshard.losses import packed_cross_entropy, sample_losses
from dpshard.sampling import Packing


class PrivateTrainer(Trainer):
    """torchtitan's Trainer with private training; `private(config)` makes its config.

    `engine` is the PrivacyEngine. Raises ConfigurationError for unsupported settings.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """A Trainer.Config with a section [privacy]."""

        privacy: Privacy = field(default_factory=Privacy)

    config: Config  # type: ignore[assignment]

    def __init__(self, config: Config) -> None:
        refuse_unsupported(config)
        losses = DocumentLosses()
        config.model_spec = prepared(config.model_spec, losses)
        super().__init__(config)
        model, training = self.model_parts[0], config.training
        dims = self.parallel_dims
        documents: Any = self.dataloader
        balancer = config.parallelism.context_parallel_load_balancer
        self._parts = DocumentParts(dims.get_mesh("cp"), balancer) if dims.cp_enabled else None
        self._stages = PipelinedDocuments(dims.get_mesh("pp"), self.pp_schedule, losses) if dims.pp_enabled else None
        divided = self._parts or self._stages
        self.engine = PrivacyEngine(
            model,
            batch_size=max(training.global_batch_size, training.local_batch_size * dims.dp_replicate * dims.dp_shard),
            sample_size=len(documents),
            steps=training.steps,
            **config.privacy.settings(),
            **({} if divided is None else divided.settings),
        )
        self._state: EngineState | None = None
        if config.checkpoint.enable:
            self._state = EngineState(self.engine, Path(config.dump_folder, config.checkpoint.folder))
            self.checkpointer.states["privacy"] = self._state  # type: ignore[attr-defined]

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Return the remaining logical batches; CheckpointError at another step."""
        if self.step != self.engine.step:
            raise CheckpointError(
                f"torchtitan resumes at step {self.step}, the privacy engine at step {self.engine.step}: the "
                f"checkpoint lacks the state of one of them. Resume from another checkpoint."
            )
        if self._state is not None:
            self._state.begin()
        rows, per_row = self.config.training.local_batch_size, self.config.privacy.documents_per_row
        tokens, loader = self.config.training.seq_len, data_iterable.config
        options: Any = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "prefetch_factor")}
        options |= (
            {"collate_fn": PaddedRows(tokens)} if per_row == 1 else {"packing": Packing(rows=rows, tokens=tokens)}
        )
        return self.engine.batches(data_iterable, rows * per_row, **options)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Train on one logical batch."""
        engine, metrics = self.engine, self.metrics_processor
        self.optimizers.zero_grad()
        rates = self.lr_schedulers.get_metrics()
        start = time.perf_counter()
        for batch in next(data_iterator):
            metrics.data_loading_times.append(time.perf_counter() - start)
            losses_B = self._train_on({name: x.to(self.device) for name, x in batch.items()})
            if losses_B is not None:
                engine.record_loss(losses_B)
            self.ntokens_seen += batch["input_ids"].numel()
            metrics.ntokens_since_last_log += batch["input_ids"].numel()
            start = time.perf_counter()
        engine.privatize()  # what follows reads private gradients
        norm = dist_utils.clip_grad_norm_(
            self.model_parts[0].parameters(),
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=None if self._stages is None else self._stages.mesh,
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if metrics.should_log(self.step):
            self._log(float(norm), rates)

    def _train_on(self, batch: dict[str, Tensor]) -> Tensor | None:
        if self._stages is not None:
            return self._stages.train(batch)
        losses_B = self._losses(batch)
        losses_B.mean().backward()
        return losses_B if self._parts is None else self._parts.whole(losses_B)

    def _losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Return losses of documents [B], this rank's terms, or [units] of packed rows."""
        targets = batch["targets"]
        if self._parts is not None:
            batch = self._parts.own(batch)
        logits = self.model_parts[0](batch["input_ids"], batch["position_ids"])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        if self._parts is not None:
            return self._parts.terms(logits, batch["targets"], targets)
        if "unit_ids" not in batch:
            return sample_losses(logits, batch["targets"])
        units = self.config.training.local_batch_size * self.config.privacy.documents_per_row
        return packed_cross_entropy(logits, batch["targets"], batch["unit_ids"], units, causal=False)

    def _log(self, norm: float, rates: dict[str, Any]) -> None:
        figures = self.engine.metrics()
        loss = figures.pop("loss", float("nan"))
        dims = self.parallel_dims
        more = {f"privacy/{name}": value for name, value in figures.items()}
        more |= {"privacy/epsilon": self.engine.epsilon(), "privacy/gradient_noise_std": self.engine.gradient_noise_std}
        more["n_tokens_seen"] = self.ntokens_seen * dims.dp_replicate * dims.dp_shard
        self.metrics_processor.log(self.step, loss, loss, norm, extra_metrics=more | rates)

    def train(self) -> None:
        """Train to the end of the run, and log the guarantee."""
        super().train()
        logger.info(self.engine.statement())


def private(config: Trainer.Config, privacy: Privacy | None = None) -> PrivateTrainer.Config:
    """Return the config of a private run of `config`, which a function of a config registry returns.

    It draws documents from the same data set, with the mean loss over each document's tokens. It uses spmd_backend
    "partial_dtensor", without CUDA graphs, and does not clip the private gradient.
    """
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(Trainer.Config)}
    loss, loader = config.loss, config.dataloader
    if isinstance(loss, ChunkedLossWrapper.Config):
        given["loss"] = loss.loss_fn
    if isinstance(loader, HuggingFaceTextDataLoader.Config):
        kept = ("dataset", "dataset_path", "num_workers", "pin_memory", "prefetch_factor")
        given["dataloader"] = Documents.Config(**{name: getattr(loader, name) for name in kept})
    training = dataclasses.replace(config.training, disable_cuda_graphs=True, max_norm=float("inf"))
    parallelism = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    given |= {"training": training, "parallelism": parallelism, "privacy": privacy or Privacy()}
    return PrivateTrainer.Config(**given)
