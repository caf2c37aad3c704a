"""Opacus's PrivacyEngine."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import IO, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpshard import engine as core
from dpshard.config import AccountantName, LossReduction, SamplingName, require_choice
from dpshard.errors import ConfigurationError, EngineInUseError
from dpshard.integrations.opacus.accountants.accountant import ACCOUNTANTS, Accountant
from dpshard.integrations.opacus.criterion import DPLoss
from dpshard.integrations.opacus.data_loader import DPDataLoader, expected_batch_size, original_loader, steps_of_round
from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.optimizers import DPOptimizer
from dpshard.integrations.opacus.progress import Progress
from dpshard.integrations.opacus.settings import ClippingSettings, refuse_unaccounted
from dpshard.integrations.opacus.validators import ModuleValidator


class PrivacyEngine:
    """Opacus's interface that makes model, optimizer and data loader private.

    Args:
        accountant: "prv" (dpshard's "pld"), "rdp", or "gdp".
        secure_mode: Draw the noise on the CPU from a cryptographic stream.

    After `make_private`, `engine` is the `dpshard.PrivacyEngine`.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        require_choice("accountant", accountant, tuple(ACCOUNTANTS))
        self.accountant = Accountant()
        self.secure_mode = secure_mode
        self._accountant_name: AccountantName = ACCOUNTANTS[accountant]

    @property
    def engine(self) -> core.PrivacyEngine:
        """The dpshard engine. Raises ConfigurationError before `make_private`."""
        if self.accountant.engine is None:
            raise ConfigurationError("Nothing is private yet: call make_private first.")
        return self.accountant.engine

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any] | DPDataLoader,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: LossReduction = "mean",
        poisson_sampling: bool = True,
        clipping: Literal["flat", "per_layer"] = "flat",
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> tuple[Any, ...]:
        """Return (module, optimizer, data_loader), with "ghost" modes (module, optimizer, criterion, data_loader).

        `noise_multiplier`: noise standard deviation over the sensitivity. `max_grad_norm`: L2 clipping norm of a
        sample; with clipping="per_layer" a list of one equal norm per parameter. `wrap_model` and `rand_on_empty` have
        no effect. With `poisson_sampling=False` every sample is in one random batch of each epoch ("balls-in-bins"), as
        epsilon takes into account. It needs accountant="prv".

        Raises ConfigurationError for settings that cannot be accounted (batch_first=False, a noise_generator, adaptive
        clipping); EngineInUseError on a second call.
        """
        refuse_unaccounted(batch_first=batch_first, noise_generator=noise_generator)
        settings = ClippingSettings(max_grad_norm, clipping, loss_reduction, grad_sample_mode)
        return self._make_private(
            module, optimizer, criterion, data_loader, settings, poisson_sampling, noise_multiplier=noise_multiplier
        )

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any] | DPDataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: LossReduction = "mean",
        poisson_sampling: bool = True,
        clipping: Literal["flat", "per_layer"] = "flat",
        noise_generator: None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> tuple[Any, ...]:
        """Make private with the least noise that keeps `epochs` rounds of the loader within the budget.

        A step that would exceed `target_epsilon` raises BudgetExceededError.
        """
        refuse_unaccounted(batch_first=batch_first, noise_generator=noise_generator)
        settings = ClippingSettings(max_grad_norm, clipping, loss_reduction, grad_sample_mode)
        budget = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        return self._make_private(
            module, optimizer, criterion, data_loader, settings, poisson_sampling, epochs=epochs, **budget
        )

    def _make_private(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any,
        data_loader: DataLoader[Any] | DPDataLoader,
        settings: ClippingSettings,
        poisson: bool,
        *,
        epochs: int = 1,
        **budget: float,
    ) -> tuple[Any, ...]:
        self._require_unused()
        module = module._module if isinstance(module, GradSampleModule) else module
        optimizer = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        _require_same_parameters(module, optimizer)
        reduction = settings.loss_reduction
        loss = DPLoss(criterion or nn.CrossEntropyLoss(reduction=reduction), reduction) if settings.ghost else None
        loader = original_loader(data_loader)
        style, norm = settings.style_and_norm(module)
        size = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = expected_batch_size(loader)
        sampling: SamplingName = "poisson" if poisson else "balls-in-bins"
        privacy: Any = {"target_delta": min(1e-5, 0.1 / size), **budget}
        engine = core.PrivacyEngine(
            module,
            batch_size=batch_size,
            sample_size=size,
            steps=epochs * steps_of_round(loader, batch_size, sampling),
            **privacy,
            max_grad_norm=norm,
            clipping_fn="abadi",
            clipping_style=style,
            clipping_mode=settings.mode,
            accountant=self._accountant_name,
            loss_reduction=reduction,
            sampling=sampling,
            secure_mode=self.secure_mode,
        )
        self.accountant.engine = engine
        progress = Progress()
        private = (
            GradSampleModule(module, engine, progress),
            DPOptimizer(optimizer, engine, progress, sums=reduction == "sum"),
        )
        batches = DPDataLoader(loader)
        if isinstance(data_loader, DPDataLoader) and not data_loader.is_private:
            batches = data_loader
        batches.complete(engine, progress)
        return (*private, batches) if loss is None else (*private, loss, batches)

    def _require_unused(self) -> None:
        if self.accountant.engine is not None:
            raise EngineInUseError(
                "make_private was called before. Make another PrivacyEngine for another model (two runs on one data "
                "set spend the sum of both), or call load_checkpoint to resume a run."
            )

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon so far at `delta`."""
        return self.accountant.get_epsilon(delta)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Return True if no layer of `module` must be replaced."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise UnsupportedParameterError for a layer that must be replaced."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy of `module` with such layers replaced."""
        return ModuleValidator.fix(module)

    def save_checkpoint(
        self,
        *,
        path: str | PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save model, optimizer and engine: as secret as the data."""
        saved = dict(checkpoint_dict or {})
        saved["module_state_dict"] = module.state_dict()
        saved["privacy_engine_state_dict"] = self.engine.state_dict()
        if optimizer is not None:
            saved["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(saved, path)

    def load_checkpoint(
        self,
        *,
        path: str | PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Resume a saved run after `make_private` with its settings; return everything saved.

        Raises CheckpointError for a damaged state or other settings.
        """
        saved = torch.load(path, weights_only=True)
        self.engine.load_state_dict(saved["privacy_engine_state_dict"])
        module.load_state_dict(saved["module_state_dict"])
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer_state_dict"])
        return saved


def _require_same_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {p for p in module.parameters() if p.requires_grad}
    if not held <= set(module.parameters()) or not trained <= held:
        raise ConfigurationError(
            "optimizer and module have different parameters. Make the optimizer from the parameters of the module "
            "(after ModuleValidator.fix, of the fixed one), and freeze those that it must not train."
        )
