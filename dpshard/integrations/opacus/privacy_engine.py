"""Opacus's PrivacyEngine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import IO, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpshard import engine as core
from dpshard.config import AccountantName, LossReduction, check_choice
from dpshard.errors import ConfigurationError, EngineInUseError
from dpshard.integrations.opacus.accountants import Accountant
from dpshard.integrations.opacus.criterion import DPLoss
from dpshard.integrations.opacus.data_loader import DPDataLoader, original_loader
from dpshard.integrations.opacus.grad_sample import GradSampleModule
from dpshard.integrations.opacus.optimizers import DPOptimizer
from dpshard.integrations.opacus.progress import Progress
from dpshard.integrations.opacus.validators import ModuleValidator

_ACCOUNTANTS: dict[str, AccountantName] = {"prv": "pld", "rdp": "rdp", "gdp": "gdp"}
"""Both of the first compose privacy loss distributions numerically."""
_MODES = {"hooks": "auto", "functorch": "auto", "ew": "auto", "ghost": "mixed-ghost", "ghost_fsdp": "auto"}
"""Clipping modes by grad_sample_mode; they differ in time and memory alone."""


class PrivacyEngine:
    """Makes model, optimizer and data loader private; the interface is that of Opacus.

    Args:
        accountant: "prv" (which stands for dpshard's "pld"), "rdp", or "gdp".
        secure_mode: Draw the noise on the CPU from a cryptographic stream, for every device; no other package needed.

    `engine` is the `dpshard.PrivacyEngine` beneath, after `make_private`.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        check_choice("accountant", accountant, tuple(_ACCOUNTANTS))
        self.accountant = Accountant()
        self.secure_mode = secure_mode
        self._accountant_name: AccountantName = _ACCOUNTANTS[accountant]

    @property
    def engine(self) -> core.PrivacyEngine:
        """The engine beneath; ConfigurationError before `make_private`."""
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
        """(module, optimizer, data_loader), and with "ghost" modes (module, optimizer, criterion, data_loader).

        `noise_multiplier` is the standard deviation of the noise over the sensitivity, `max_grad_norm` the L2 norm at
        which each sample's gradient is clipped; with clipping="per_layer" a list with one equal norm per parameter.
        The user's model stays as it is and may be used beside what is returned, so `wrap_model` changes nothing;
        nor does `rand_on_empty`, for an empty batch is one row of padding.

        Raises ConfigurationError for what would not be accounted: poisson_sampling=False, batch_first=False, a
        noise_generator, adaptive clipping; EngineInUseError when called a second time.
        """
        return self._make_private(
            noise_multiplier=noise_multiplier,
            target_epsilon=None,
            target_delta=None,
            epochs=1,
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
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
        """Like `make_private`, with the smallest noise that keeps `epochs` rounds of the loader within the budget.

        A step that would pass `target_epsilon` raises BudgetExceededError.
        """
        return self._make_private(
            noise_multiplier=None,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
        )

    def _make_private(
        self,
        *,
        noise_multiplier: float | None,
        target_epsilon: float | None,
        target_delta: float | None,
        epochs: int,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any,
        data_loader: DataLoader[Any] | DPDataLoader,
        max_grad_norm: float | Sequence[float],
        batch_first: bool,
        loss_reduction: LossReduction,
        poisson_sampling: bool,
        clipping: str,
        noise_generator: Any,
        grad_sample_mode: str,
    ) -> tuple[Any, ...]:
        if self.accountant.engine is not None:
            raise EngineInUseError(
                "make_private was called before: make another PrivacyEngine for another model (what two runs on one "
                "data set spend adds up), or load_checkpoint to go on with a run."
            )
        _refuse(poisson_sampling, batch_first, noise_generator, grad_sample_mode)
        module = module._module if isinstance(module, GradSampleModule) else module
        optimizer = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        _require_same_parameters(module, optimizer)
        ghost = grad_sample_mode.startswith("ghost")
        loss = DPLoss(criterion or nn.CrossEntropyLoss(reduction=loss_reduction), loss_reduction) if ghost else None
        loader = original_loader(data_loader)
        style, norm = _clipping(clipping, max_grad_norm, module)
        size = len(loader.dataset)  # type: ignore[arg-type]
        engine = core.PrivacyEngine(
            module,
            # Opacus divides by int(N * q) with q = 1 / len(loader). The sampler takes that very number, so that the
            # divisor is the expected batch size.
            batch_size=max(1, size // len(loader)),
            sample_size=size,
            steps=epochs * len(loader),
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            target_delta=min(1e-5, 0.1 / size) if target_delta is None else target_delta,
            max_grad_norm=norm,
            clipping_fn="abadi",
            clipping_style=style,
            clipping_mode=_MODES[grad_sample_mode],
            accountant=self._accountant_name,
            loss_reduction=loss_reduction,
            secure_mode=self.secure_mode,
        )
        self.accountant.engine = engine
        progress = Progress()
        private = (
            GradSampleModule(module, engine, progress),
            DPOptimizer(optimizer, engine, progress, sums=loss_reduction == "sum"),
        )
        batches = DPDataLoader(loader, engine, progress)
        return (*private, batches) if loss is None else (*private, loss, batches)

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at `delta`."""
        return self.accountant.get_epsilon(delta)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether no layer of `module` must be replaced."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise UnsupportedParameterError for a layer that must be replaced."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of `module` with such layers replaced."""
        return ModuleValidator.fix(module)

    def save_checkpoint(
        self,
        *,
        path: str | PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save model, optimizer, and the engine's state, which holds the run secret: guard the file like the data."""
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
        """Go on with a saved run, after `make_private` with its settings; what else was saved is returned.

        Raises CheckpointError if the state is damaged, or that of other settings.
        """
        saved = torch.load(path, weights_only=True)
        self.engine.load_state_dict(saved["privacy_engine_state_dict"])
        module.load_state_dict(saved["module_state_dict"])
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer_state_dict"])
        return saved


def _refuse(poisson_sampling: bool, batch_first: bool, noise_generator: Any, grad_sample_mode: str) -> None:
    """Raise ConfigurationError for what cannot be done as accounted."""
    if not poisson_sampling:
        raise ConfigurationError(
            "poisson_sampling=False trains on shuffled batches, while epsilon is computed for Poisson sampling: the "
            "true one may be many times larger. Leave it out."
        )
    if not batch_first:
        raise ConfigurationError(
            "batch_first=False: let the data set give samples in dimension 0, and transpose in the model's forward. "
            "(Layers with batch_first=False, such as nn.LSTM's default, work within it.)"
        )
    if noise_generator is not None:
        raise ConfigurationError(
            "noise_generator would make the noise predictable to whoever knows its seed. Leave it out: noise "
            "comes from a secret of the run, and save_checkpoint makes a run repeatable."
        )
    if grad_sample_mode not in _MODES:
        raise ConfigurationError(
            f"grad_sample_mode={grad_sample_mode!r}: choose one of {list(_MODES)}. Gradients are computed by dpshard; "
            f"there is no p.grad_sample to fill."
        )


def _require_same_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {p for p in module.parameters() if p.requires_grad}
    if not held <= set(module.parameters()) or not trained <= held:
        raise ConfigurationError(
            "optimizer and module have different parameters. Make the optimizer of those of the module (after "
            "ModuleValidator.fix, of those of the fixed one), and freeze what it shall not train."
        )


def _clipping(clipping: str, max_grad_norm: float | Sequence[float], module: nn.Module) -> tuple[Any, float]:
    """Clipping style and total norm."""
    if clipping == "flat" and isinstance(max_grad_norm, (int, float)):
        return "all-layer", float(max_grad_norm)
    if clipping == "per_layer" and isinstance(max_grad_norm, Sequence):
        norms = [float(norm) for norm in max_grad_norm]
        count = sum(p.requires_grad for p in module.parameters())
        if len(norms) == count and math.isclose(min(norms), max(norms)):
            return "param-wise", math.sqrt(sum(norm * norm for norm in norms))
        raise ConfigurationError(
            f"clipping='per_layer' takes one norm for each of the {count} trainable parameters, all equal: "
            f"max_grad_norm=[R / sqrt({count})] * {count}, for a total of R."
        )
    raise ConfigurationError(
        f"clipping={clipping!r} with max_grad_norm={max_grad_norm!r}: give 'flat' with a number, or 'per_layer' with a "
        f"list of equal numbers. Adaptive clipping is not there; dpshard's own clipping_fn='automatic' needs no norm "
        f"to be tuned."
    )
