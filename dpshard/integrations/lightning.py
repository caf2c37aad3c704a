"""Lightning: a callback that makes fitting private.

The callback's loader yields logical batches, so Lightning's steps count releases; `training_step` runs once per
micro-batch. Lightning runs the last backward, after a zero_grad that would discard clipped sums. So the callback calls
zero_grad before the first micro-batch instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from dpshard.config import refuse_units
from dpshard.engine import PrivacyEngine
from dpshard.errors import CheckpointError, ConfigurationError, EngineInUseError
from dpshard.integrations.loaders import batches_of
from dpshard.randomness import host_states, restore_host
from dpshard.sampling import require_dataset
from dpshard.step.logical_batch import LogicalBatch


class PrivateTraining(L.Callback):
    """A callback for private fitting.

    private = PrivateTraining(loader, ...); Trainer(callbacks=[private]).fit(module, private.loader)

    Args:
        loader: Train loader. Its batch_size is the expected logical batch; Poisson sampling replaces its sampler.
        micro_batch_size: Rows per forward; by default batch_size.
        pad: False if training_step sorts or augments rows; else padding fills the last micro-batches.
        **privacy: Settings of `dpshard.PrivacyEngine`, except batch size, sample size and steps.

    `engine` exists once fitting has begun. Checkpoints hold its state and random states. Raises ConfigurationError for
    a module or Trainer that would not be private as accounted, such as one on several processes.
    """

    def __init__(
        self, loader: DataLoader[Any], *, micro_batch_size: int | None = None, pad: bool = True, **privacy: Any
    ) -> None:
        if loader.batch_size is None:
            raise ConfigurationError("The loader has no batch_size, which is the expected logical batch: give it one.")
        refuse_units(privacy, "PrivateTraining")
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0  # type: ignore[arg-type]
        require_dataset(loader.dataset, size)
        self.engine: PrivacyEngine | None = None
        self.loader = _CallbackLoader(self, loader, micro_batch_size or loader.batch_size, pad=pad)
        self._settings = {"batch_size": loader.batch_size, "sample_size": size, **privacy}
        self._loaded: Mapping[str, Any] | None = None
        self._running: Iterator[Any] | None = None

    # --- the fit ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create or resume the engine."""
        _require_supported(trainer, pl_module)
        if self.engine is not None and self._loaded is None:
            raise EngineInUseError(
                "This callback has already fitted a model, and another fit spends more privacy. Fit with ckpt_path=, "
                "or detach() the engine and create another PrivateTraining."
            )
        if self.engine is None:
            steps = trainer.max_steps if trainer.max_steps > 0 else len(self.loader) * int(trainer.max_epochs or 1)
            self.engine = PrivacyEngine(pl_module, steps=steps, **self._settings)
        if self._loaded is not None:
            self.engine.load_state_dict(dict(self._loaded["engine"]))
        engine, step, backward = self.engine, pl_module.training_step, pl_module.backward

        def training_step(logical_batch: LogicalBatch, *others: Any) -> Any:
            return self._over_micro_batches(trainer, step, backward, logical_batch, *others)

        def private_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            engine.privatize()  # before any on_after_backward logs or clips gradients

        pl_module.training_step = training_step
        pl_module.backward = private_backward
        pl_module.optimizer_zero_grad = lambda *_: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Require the ledger to agree with Lightning's steps."""
        assert self.engine is not None
        if self.engine.step != trainer.global_step:
            raise CheckpointError(
                f"Lightning resumes at step {trainer.global_step}, the privacy engine at step {self.engine.step}: the "
                f"checkpoint was saved without this callback, so its spent budget would be forgotten. Resume from a "
                f"checkpoint that was saved with it."
            )
        if self._loaded is not None:
            _restore_random(self._loaded["random"])
            self._loaded = None

    def _over_micro_batches(
        self, trainer: L.Trainer, step: Any, backward: Any, logical_batch: LogicalBatch, *others: Any
    ) -> Any:
        """Run forward on all micro-batches, and backward on all but the last, whose backward Lightning runs."""
        if not isinstance(logical_batch, LogicalBatch):
            raise ConfigurationError(
                "fit() got another loader, without Poisson sampling: call fit(module, private.loader)."
            )
        _require_undivided(trainer)  # a callback may have changed it
        optimizer: Any = trainer.optimizers[0]
        optimizer.zero_grad()
        output = None
        self._running = iter(logical_batch)  # keeps the last micro-batch current until its backward
        for micro_batch in self._running:
            output = step(trainer.strategy.batch_to_device(micro_batch), *others)
            if logical_batch.complete:
                break
            loss = output["loss"] if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                with torch.autocast(loss.device.type, enabled=False):
                    backward(loss)  # without Lightning's hooks, because gradients are not private yet
        return output

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Release the logical batch, also without a loss."""
        assert self.engine is not None
        self._running = None
        self.engine.privatize()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log epsilon whenever Lightning logs."""
        assert self.engine is not None
        every = getattr(trainer, "log_every_n_steps", 0)
        if every and self.engine.step % every == 0:
            pl_module.log("epsilon", self.engine.epsilon(), prog_bar=True)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the module's own methods."""
        for name in ("training_step", "backward", "optimizer_zero_grad"):
            pl_module.__dict__.pop(name, None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the module's own methods."""
        self.on_fit_end(trainer, pl_module)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the engine and the random generators; guard them like the data."""
        return {} if self.engine is None else {"engine": self.engine.state_dict(), "random": _random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until fitting begins."""
        self._loaded = state_dict or None


class _CallbackLoader:
    def __init__(self, callback: PrivateTraining, loader: DataLoader[Any], micro_batch_size: int, *, pad: bool) -> None:
        self._callback, self._loader, self._micro_batch_size, self._pad = callback, loader, micro_batch_size, pad

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[LogicalBatch]:
        engine = self._callback.engine
        if engine is None:
            raise ConfigurationError("Pass the callback that this loader belongs to: Trainer(callbacks=[private]).")
        # A loader draws a seed, which must not change the random states of a resumed epoch.
        with torch.random.fork_rng(devices=[]):
            return batches_of(self._loader, engine, self._micro_batch_size, steps=len(self), pad=self._pad)


def _require_supported(trainer: L.Trainer, module: L.LightningModule) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError(
            "automatic_optimization=False: create a PrivacyEngine in the module's own loop, and iterate over "
            "engine.batches(...)."
        )
    _require_undivided(trainer)
    if trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} on {trainer.world_size} devices: this callback trains on one device. "
            f"On several use accelerate, the Trainer of Hugging Face, or your own loop; see docs/integrations.md."
        )
    if trainer.max_steps <= 0 and (trainer.max_epochs or -1) < 0:
        raise ConfigurationError("max_epochs=-1: a private run has a fixed length. Give max_epochs or max_steps.")


def _require_undivided(trainer: L.Trainer) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            "accumulate_grad_batches divides losses before gradients are clipped: leave it at 1. The loader's "
            "batch_size is the logical batch; set micro_batch_size to rows that fit into memory."
        )


def _random_states() -> dict[str, Any]:
    of_torch, (kind, keys, *rest), of_python = host_states()
    return {
        "torch": of_torch,
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": of_python,
    }


def _restore_random(states: Mapping[str, Any]) -> None:
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    kind, keys, *rest = states["numpy"]
    version, internal, gauss = states["python"]
    restore_host((states["torch"], (kind, keys.numpy().astype(np.uint32), *rest), (version, tuple(internal), gauss)))
