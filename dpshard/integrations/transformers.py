"""Hugging Face Trainer with private training: `PrivateTrainer`.

One item of the train loader is one logical batch, so steps, logs, schedulers and checkpoints count releases. The
Trainer's own clipping, division by tokens, and loss scaling would invalidate the accounting. They are switched off with
a message, or refused.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments

from dpshard.checkpoint.disk import open_private
from dpshard.config import refuse_units
from dpshard.engine import PrivacyEngine
from dpshard.errors import CheckpointError, ConfigurationError, EngineInUseError
from dpshard.integrations.accelerate import require_supported, shard_on_cpu
from dpshard.integrations.given_losses import GivenLoss
from dpshard.integrations.packed_documents import CollatedDocuments, packing_of, refuse_packed
from dpshard.integrations.token_losses import OWN_LOSS, learn_shift, logits_of, token_losses, uneven
from dpshard.losses import packed_cross_entropy
from dpshard.sampling import Packing, require_dataset

STATE = "dpshard.json"
"""The engine's state in a checkpoint folder."""
_OURS = ("batch_size", "sample_size", "steps", "epochs", "loss_reduction")
_LOGICAL_BATCH = "logical_batch"
_logger = logging.getLogger(__name__)


class ShardsOnCPU:
    """A mix-in before a Trainer: TrainingArguments(fsdp=True) works without a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.fsdp and trainer.accelerator.distributed_type is DistributedType.MULTI_CPU:
            shard_on_cpu(trainer.accelerator, FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args))
            trainer.is_fsdp_enabled = True


class _Private(ShardsOnCPU):
    """A mix-in before a subclass of Trainer that makes its training private.

    Args:
        model, args: As for the Trainer. per_device_train_batch_size rows make a micro-batch; times
            gradient_accumulation_steps and processes, the expected logical batch.
        privacy: Settings of `dpshard.PrivacyEngine`, except batch size, sample size, steps and loss reduction.
        packing: Packs documents into rows, at most per_device_train_batch_size in a micro-batch.
            SFTConfig(packing=True) means Packing(rows=1, tokens=max_length).

    `engine` exists once training has begun. Raises ConfigurationError for arguments that would break the accounting.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        privacy: Mapping[str, Any],
        packing: Packing | None = None,
        **more: Any,
    ) -> None:
        if given := [name for name in _OURS if name in privacy]:
            raise ConfigurationError(
                f"privacy= holds {', '.join(given)}, which follow from the Trainer: leave them out. The expected batch "
                f"is per_device_train_batch_size * gradient_accumulation_steps * processes. num_train_epochs or "
                f"max_steps sets the length of the run. Every loss is a mean over samples."
            )
        own = [cls.__name__ for cls in type(self).__mro__ if issubclass(cls, _Private) and "compute_loss" in vars(cls)]
        if own[:-1]:
            raise ConfigurationError(
                f"{own[0]} overrides compute_loss, so verification cannot compare its loss with that of single "
                f"samples: a mean over the tokens of a batch would pass. {OWN_LOSS}"
            )
        if "compute_loss_func" not in more and (foreign := _foreign_loss(type(self))):
            raise ConfigurationError(
                f"{foreign} has a loss of its own, which may mix samples: verification does not see it. {OWN_LOSS} "
                f"For preference pairs, use dpshard.integrations.trl.PrivateDPOTrainer."
            )
        args = TrainingArguments() if args is None else args
        _require_supported(args)
        refuse_units(privacy, "PrivateTrainer")
        self._packing = packing_of(args, packing, more.get("data_collator") or next(iter(others), None))
        if self._packing is not None and more.get("compute_loss_func") is not None:
            raise ConfigurationError(
                "With packing, the loss is the mean cross-entropy of each document: leave compute_loss_func out."
            )
        self.engine: PrivacyEngine | None = None
        self._privacy = dict(privacy)
        self._expected = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._resumed_from: str | None = None
        self._verified = False
        self._given: GivenLoss | None = None
        self._shift: bool | None = None
        self._losses_B: Tensor | None = None
        # By name: some trainers have another second argument.
        settings = (model, _neutral(args), *others) if others else (model,)
        super().__init__(*settings, **more, **({} if others else {"args": _neutral(args)}))
        self.add_callback(_Begin(self._begin))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; ConfigurationError if it would change gradients or split samples."""
        super().create_accelerator_and_postprocess()
        require_supported(self.accelerator)  # type: ignore[attr-defined]

    # --- data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the logical batches of an epoch."""
        trainer: Any = self
        refuse_packed(trainer.train_dataset)
        if isinstance(trainer.train_dataset, Sized):
            require_dataset(trainer.train_dataset, len(trainer.train_dataset))  # before the Trainer makes a sampler
        ordinary = super().get_train_dataloader()  # type: ignore[misc]
        return _TrainerLoader(self, ordinary.dataset, ordinary.collate_fn)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the expected logical batch size."""
        return self._expected

    # --- training ---------------------------------------------------------------------------------------------------

    def _begin(self, steps: int, released: int) -> None:
        trainer: Any = self
        if self.engine is not None and self._resumed_from is None:
            raise EngineInUseError(
                "This Trainer has trained before. Another training of this model on the same data spends more privacy. "
                "Resume from a checkpoint, or detach() the engine and create another PrivateTrainer."
            )
        if self.engine is None:
            self.engine = PrivacyEngine(
                self._trained(),
                batch_size=self._expected,
                sample_size=len(trainer.train_dataset),
                steps=steps,
                **self._privacy,
            )
        if self._resumed_from is not None:
            self.engine.load_state_dict(_read(Path(self._resumed_from)))
            self._resumed_from = None
        if self.engine.step != released:
            raise CheckpointError(
                f"The Trainer resumes at step {released}, the privacy engine at step {self.engine.step}: {STATE} of "
                f"the checkpoint belongs to another step. Resume from another checkpoint."
            )

    def _trained(self) -> nn.Module:
        return self.model_wrapped  # type: ignore[attr-defined]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collect the clipped sums of all micro-batches, and add the noise.

        Returns the mean loss over samples of all ranks; NaN for an empty batch.
        """
        trainer, engine = self, self.engine
        assert engine is not None
        for micro_batch in inputs[_LOGICAL_BATCH]:
            self._losses_B = None
            loss = super().training_step(model, micro_batch)  # type: ignore[misc]
            engine.record_loss(loss if self._losses_B is None else self._losses_B)
            trainer.current_flos += float(trainer.floating_point_ops(micro_batch))  # type: ignore[attr-defined]
        engine.privatize()  # the Trainer reads gradients before it steps
        return torch.tensor(engine.metrics().get("loss", math.nan), device=trainer.args.device)  # type: ignore[attr-defined]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; in training the mean of the per-sample losses, never divided by tokens.

        Raises ConfigurationError if the model's own loss would mix samples.
        """
        if not model.training or self.engine is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        return self._training_loss(model, inputs, return_outputs)

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self._packing is not None:
            return self._packed_loss(model, inputs, return_outputs)
        loss_fn = self._loss_outside(model, inputs)
        if loss_fn is None:
            labels = inputs.get("labels")
            if isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == -100).any()):
                raise ConfigurationError(
                    f"Samples have the ignored label -100: the model divides its loss by the number of other samples, "
                    f"which mixes samples. Leave them out of the data set. {OWN_LOSS}"
                )
            return super().compute_loss(model, inputs, return_outputs)  # type: ignore[misc]
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        bare: Any = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        if getattr(getattr(bare, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = bare.prepare_decoder_input_ids_from_labels(labels=labels)
        loss, outputs = self._verified_loss(model, inputs, loss_fn, (labels,), (uneven(labels),))
        if self.compute_loss_func is not None and self._privacy.get("verify", True):  # type: ignore[attr-defined]
            assert self.engine is not None
            self._given = self._given or GivenLoss(loss_fn)
            self._given.require_mean(outputs, labels, self.engine.step)
        return (loss, outputs) if return_outputs else loss

    def _verified_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        loss_fn: Callable[..., Tensor],
        targets: tuple[Tensor, ...],
        targets_to_verify: tuple[Tensor, ...],
    ) -> tuple[Tensor, Any]:
        """Return the mean of losses [B] (or their mean []) and the outputs; verify the loss before the first."""
        assert self.engine is not None
        if not self._verified and self._privacy.get("verify", True):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "engine.verify: ")  # a given loss is compared on later labels, too
                self.engine.verify(loss_fn=lambda *x: loss_fn(*x).mean(), targets=targets_to_verify, **inputs)
            self._verified = True
        outputs = model(**inputs)
        losses = loss_fn(outputs, *targets)
        self._losses_B = losses.detach() if losses.dim() else None
        return losses.mean(), outputs

    def _packed_loss(self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool) -> Any:
        config: Any = getattr(self.accelerator.unwrap_model(model), "config", None)  # type: ignore[attr-defined]
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigurationError(
                "Packing needs a model that reads one stream of tokens, not an encoder with a decoder."
            )
        rows = dict(inputs)
        unit_ids = rows.pop("unit_ids")
        if self._shift is None:
            self._shift = learn_shift(model, rows)
        labels, shift = rows.pop("labels"), self._shift
        units: int = self.args.per_device_train_batch_size  # type: ignore[attr-defined]

        def loss_fn(outputs: Any, labels: Tensor, unit_ids: Tensor) -> Tensor:
            return packed_cross_entropy(logits_of(outputs, labels), labels, unit_ids, units, causal=shift)

        if hasattr(config, "use_cache"):
            rows["use_cache"] = False  # with a cache, Transformers lets documents see each other
        loss, outputs = self._verified_loss(model, rows, loss_fn, (labels, unit_ids), (labels, unit_ids))
        return (loss, outputs) if return_outputs else loss

    def _loss_outside(self, model: nn.Module, inputs: Mapping[str, Any]) -> Callable[[Any, Tensor], Tensor] | None:
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return None
        own = self.compute_loss_func  # type: ignore[attr-defined]
        if own is not None:
            return lambda outputs, labels: own(outputs, labels, num_items_in_batch=None)
        if labels.dim() < 2 or labels.is_floating_point():
            return None
        if self._shift is None:
            self._shift = learn_shift(model, inputs)
        shift = self._shift
        return lambda outputs, labels: token_losses(outputs, labels, shift)

    def log(self, logs: dict[str, float], *others: Any, **more: Any) -> None:
        """Log with the epsilon spent so far."""
        if self.engine is not None:
            logs["epsilon"] = self.engine.epsilon()
        super().log(logs, *others, **more)  # type: ignore[misc]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.engine is not None and self.args.should_save:  # type: ignore[attr-defined]
            # Only its owner may read the run secret.
            with open_private(Path(output_dir) / STATE, "w") as file:
                json.dump(self.engine.state_dict(), file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._resumed_from = checkpoint
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class PrivateTrainer(_Private, Trainer):
    """A transformers.Trainer with private training; add `privacy={"target_epsilon": 3.0}`."""


class PrivateSeq2SeqTrainer(_Private, Seq2SeqTrainer):
    """A transformers.Seq2SeqTrainer with private training; see PrivateTrainer."""


class _TrainerLoader:
    def __init__(self, trainer: _Private, dataset: Any, collate_fn: Any) -> None:
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        require_dataset(dataset, size)
        self.dataset = dataset
        self._trainer = trainer
        self._collate_fn = collate_fn
        self._steps = max(1, round(size / trainer._expected))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        engine, args = self._trainer.engine, self._trainer.args  # type: ignore[attr-defined]
        assert engine is not None
        packing, dataset, collate_fn = self._trainer._packing, self.dataset, self._collate_fn
        if packing is not None:
            dataset, collate_fn = CollatedDocuments(dataset, collate_fn), None
        # A loader draws a seed, which must not move the random states of a resumed epoch.
        with torch.random.fork_rng(devices=[]):
            batches = engine.batches(
                dataset,
                args.per_device_train_batch_size,
                steps=self._steps - engine.step % self._steps,
                collate_fn=collate_fn,
                packing=packing,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
                prefetch_factor=args.dataloader_prefetch_factor,
            )
        for logical_batch in batches:
            yield {_LOGICAL_BATCH: logical_batch}


class _Begin(TrainerCallback):
    def __init__(self, begin: Callable[[int, int], None]) -> None:
        self._call = begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._call(state.max_steps, state.global_step)


def _foreign_loss(cls: type) -> str | None:
    if cls._training_loss is not _Private._training_loss:
        return None
    known = {"Trainer", "Seq2SeqTrainer", "SFTTrainer"}
    for base in cls.__mro__:
        if issubclass(base, Trainer) and not issubclass(base, _Private) and "compute_loss" in vars(base):
            return None if base.__name__ in known else base.__name__
    return None


def _require_supported(args: TrainingArguments) -> None:
    refused = {
        f"loss_type={getattr(args, 'loss_type', None)!r} of SFTTrainer is replaced by the mean over each sample: "
        f"choose 'nll'.": getattr(args, "loss_type", None) in ("dft", "chunked_dft"),
        "fp16=True scales losses, and so gradients before they are clipped: use bf16=True.": args.fp16,
        "label_smoothing_factor averages over the tokens of all samples: pass a compute_loss_func that smooths the "
        "loss of each sample.": args.label_smoothing_factor != 0,
        "neftune_noise_alpha scales its noise by the length to which the micro-batch is padded, so a long sample "
        "changes the gradients of the others: leave it out.": bool(args.neftune_noise_alpha),
        "auto_find_batch_size begins again after an error within a logical batch: set "
        "per_device_train_batch_size.": args.auto_find_batch_size,
        "gradient_accumulation_kwargs of accelerator_config would accumulate logical batches: set "
        "gradient_accumulation_steps instead.": _accumulates_again(args),
        "DeepSpeed steps within its own backward: use FSDP2, or dpshard's loop with deepspeed.initialize().": bool(
            args.deepspeed
        ),
        f"{args.n_gpu} GPUs in one process make the Trainer use DataParallel, which splits the samples: "
        f"start one process for each by torchrun.": args.n_gpu > 1,
        "hub_strategy uploads whole checkpoints with the run secret, and its readers could subtract the noise: "
        "choose 'end' or 'every_save'.": args.push_to_hub
        and str(getattr(args.hub_strategy, "value", args.hub_strategy)) in ("checkpoint", "all_checkpoints"),
    }
    for reason, holds in refused.items():
        if holds:
            raise ConfigurationError(f"TrainingArguments: {reason}")


def _accumulates_again(args: TrainingArguments) -> bool:
    config: Any = args.accelerator_config
    return "num_steps" in (getattr(config, "gradient_accumulation_kwargs", None) or {})


def _neutral(args: TrainingArguments) -> TrainingArguments:
    neutral = copy.copy(args)
    for name in ("packing", "eval_packing", "padding_free"):  # the engine packs; see packing_of
        if getattr(args, name, None) is not None:
            setattr(neutral, name, False)
    if args.max_grad_norm:
        _logger.warning(
            "max_grad_norm=%g of TrainingArguments is not applied: every sample is clipped, and clipping their noisy "
            "sum again would only shrink the step. Set max_grad_norm of privacy={...} instead; its default is 1.",
            args.max_grad_norm,
        )
    neutral.max_grad_norm = 0.0
    neutral.gradient_accumulation_steps = 1  # of logical batches
    neutral.ignore_data_skip = True  # the engine resumes with its own batches
    return neutral


def _read(folder: Path) -> Any:
    try:
        return json.loads((folder / STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no readable {STATE}: without it, the spent budget would be forgotten. Resume from a "
            f"checkpoint of a PrivateTrainer (saved without save_only_model)."
        ) from error
