"""TRL's trainers with private training: `PrivateSFTTrainer`, `PrivateDPOTrainer`.

The unit of preference tuning is a pair. TRL's collator makes rows [2 m, L], all chosen ones first. Here a micro-batch
has m samples [m, 2, L], whose two rows meet within the model that the engine sees. So a pair is clipped once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trl import DPOConfig, DPOTrainer, SFTTrainer

from dpshard.errors import ConfigurationError
from dpshard.integrations.transformers import _Private
from dpshard.losses import sample_losses


class PrivateSFTTrainer(_Private, SFTTrainer):
    """A trl.SFTTrainer with private training; see PrivateTrainer. The loss is a mean over each sample's tokens.

    packing=True and padding_free=True pack the drawn documents into one row of max_length tokens; each is clipped by
    itself.
    """


class PrivateDPOTrainer(_Private, DPOTrainer):
    """A trl.DPOTrainer with private training; the unit of privacy is a pair, chosen and rejected, of one prompt.

    Sigmoid loss of DPO (Rafailov et al. 2023, arXiv:2305.18290), in one process or with DDP.
    per_device_train_batch_size counts pairs. Raises ConfigurationError for other losses, FSDP and DeepSpeed.
    """

    def __init__(self, model: Any = None, ref_model: Any = None, args: DPOConfig | None = None, **more: Any) -> None:
        args = DPOConfig() if args is None else args
        _require_supported(args, packing=more.get("packing"))
        self._pairs: Pairs | None = None
        super().__init__(model, args=args, ref_model=ref_model, **more)

    def get_train_dataloader(self) -> Any:
        """Return the logical batches of an epoch, of pairs."""
        batches = super().get_train_dataloader()
        batches._collate_fn = _of_pairs(batches._collate_fn)
        return batches

    def prediction_step(self, model: nn.Module, *others: Any, **more: Any) -> Any:
        """Evaluate a micro-batch."""
        with _trained_as_before(model):
            return super().prediction_step(model, *others, **more)

    def _trained(self) -> nn.Module:
        wrapped = super()._trained()
        if isinstance(wrapped, DistributedDataParallel):
            # The engine sees DDP, and DDP the model of pairs.
            self._pairs = wrapped.module = Pairs(wrapped.module)
            self._model_of_pairs = wrapped
        elif self.args.world_size > 1:
            raise ConfigurationError(
                f"PrivateDPOTrainer runs on several processes with DDP, not with {type(wrapped).__name__}: leave out "
                f"FSDP and DeepSpeed, or train in one process."
            )
        else:
            self._model_of_pairs = self._pairs = Pairs(wrapped)
        return self._model_of_pairs

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        rows = {name: inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")}
        ratio_B = self._reference(rows, inputs)
        loss, _ = self._verified_loss(self._model_of_pairs, rows, self._losses, (ratio_B,), (ratio_B,))
        return (loss, {}) if return_outputs else loss

    def _losses(self, log_probs_B2: Tensor, ratio_B: Tensor) -> Tensor:
        """Loss [B] of each pair."""
        return -F.logsigmoid(self.beta * (log_probs_B2[:, 0] - log_probs_B2[:, 1] - ratio_B))

    def _reference(self, rows: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        """Log-probability [B] of chosen over rejected."""
        if "ref_chosen_logps" in inputs:
            return inputs["ref_chosen_logps"] - inputs["ref_rejected_logps"]
        with torch.no_grad():
            reference: Any = self.ref_model
            log_probs_B2 = self._of_base(rows) if reference is None else Pairs(reference)(**rows)
        return log_probs_B2[:, 0] - log_probs_B2[:, 1]

    def _of_base(self, rows: Mapping[str, Tensor]) -> Tensor:
        bare: Any = self.accelerator.unwrap_model(self.model)
        if "ref" in bare.peft_config:
            raise ConfigurationError(
                "The model had an adapter before, which TRL keeps as the reference: merge it into the base first "
                "(merge_and_unload), or set precompute_ref_log_probs=True."
            )
        assert self._pairs is not None
        with _trained_as_before(bare), bare.disable_adapter():
            return self._pairs(**rows)


@contextmanager
def _trained_as_before(model: nn.Module) -> Iterator[None]:
    # peft freezes the adapters that it disables, and then makes all of them trainable, also a frozen lora_A.
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, trained in before:
            p.requires_grad_(trained)


class Pairs(nn.Module):
    """Rows [B, 2, L] of pairs -> log-probabilities [B, 2] of their completions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor | None = None, **more: Any
    ) -> Any:
        """Run the model on all rows at once; without `completion_mask` as it is."""
        if completion_mask is None:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        ids, attend, counted = (x.flatten(0, 1) for x in (input_ids, attention_mask, completion_mask))
        logits = self.model(input_ids=ids, attention_mask=attend, use_cache=False).logits
        labels = ids.masked_fill(counted == 0, -100)
        return -sample_losses(logits[:, :-1], labels[:, 1:], per="sample-sum").view(-1, 2)


def _of_pairs(collate_fn: Callable[[Any], Mapping[str, Tensor]]) -> Callable[[Any], dict[str, Tensor]]:
    def collate(rows: Any) -> dict[str, Tensor]:
        pairs = {}
        for name, x in collate_fn(rows).items():
            if len(x) not in (len(rows), 2 * len(rows)):
                raise ConfigurationError(
                    f"The collator made {len(x)} rows of {name} for {len(rows)} pairs: keep TRL's own."
                )
            pairs[name] = x.unflatten(0, (2, len(rows))).transpose(0, 1) if len(x) == 2 * len(rows) else x
        return pairs

    return collate


def _require_supported(args: DPOConfig, *, packing: Any) -> None:
    refused = {
        f"loss_type={args.loss_type!r}": list(args.loss_type) != ["sigmoid"],
        "loss_weights": args.loss_weights not in (None, [1.0]),
        "f_divergence_type": getattr(args.f_divergence_type, "value", args.f_divergence_type) != "reverse_kl",
        "ld_alpha": args.ld_alpha is not None,
        "use_weighting": args.use_weighting,
        "packed rows": packing is not None or bool(getattr(args, "padding_free", False)),
    }
    found = [name for name, holds in refused.items() if holds]
    if found:
        raise ConfigurationError(
            f"PrivateDPOTrainer takes the sigmoid loss of DPO, not {', '.join(found)}: some of TRL's "
            f"losses sort or average over the pairs of a batch. Leave these settings out."
        )
