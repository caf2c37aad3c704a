"""fastDP's interface: the constructor, and `attach(optimizer)` (docs/coming-from-fastdp.md).

It cannot check how a DataLoader draws batches: iterate over `privacy_engine.batches(dataset, micro_batch_size)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpshard import engine as core
from dpshard.config import AccountantName, LossReduction, require_choice
from dpshard.errors import ConfigurationError

_FUNCTIONS = {"automatic": "automatic", "Abadi": "abadi", "global": "global"}
_MODES = {"ghost": "bk", "MixGhostClip": "bk-mixed-ghost", "MixOpt": "bk-mixed-opt"}
_ACCOUNTANTS: dict[str, AccountantName] = {"rdp": "rdp", "glw": "pld"}
_STYLES = ("all-layer", "layer-wise", "param-wise")


class PrivacyEngine(core.PrivacyEngine):
    """A `dpshard.PrivacyEngine` with fastDP's constructor.

    Args:
        module: Model to train.
        batch_size: Expected logical batch size, over all ranks and accumulation steps.
        sample_size: Number of samples of the data set.
        max_grad_norm: L2 clipping norm of a sample; 1 under clipping_fn="automatic", as in fastDP.
        epochs, num_steps: Length of the run, by one of them.
        noise_multiplier: Noise standard deviation over the sensitivity; overrides `target_epsilon`.
        target_epsilon: Budget of the run.
        target_delta: By default 1 / (2 sample_size), as in fastDP; a smaller one is better.
        clipping_fn: "automatic", "Abadi", or "global".
        clipping_mode: "MixOpt", "MixGhostClip", or "ghost"; only time and memory.
        clipping_style: "all-layer", "layer-wise", "param-wise", or the first layer of each block.
        accounting_mode: "rdp", or "glw", which is dpshard's "pld".
        loss_reduction: "mean" or "sum" over the rows of the micro-batch.
        origin_params, num_GPUs, torch_seed_is_fixed, record_snr: No effect; `metrics()` has the gradient-SNR.

    Raises ConfigurationError for settings out of range, TypeError for unknown ones.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_size: int,
        sample_size: int,
        max_grad_norm: float = 1.0,
        epochs: float | None = None,
        num_steps: int | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        clipping_fn: str = "automatic",
        clipping_mode: str = "MixOpt",
        clipping_style: str | Sequence[str] = "all-layer",
        accounting_mode: str = "rdp",
        loss_reduction: LossReduction = "mean",
        origin_params: Sequence[str] | None = None,
        num_GPUs: int = 1,
        torch_seed_is_fixed: bool = False,
        record_snr: bool = False,
    ) -> None:
        require_choice("clipping_fn", clipping_fn, tuple(_FUNCTIONS))
        require_choice("clipping_mode", clipping_mode, tuple(_MODES))
        require_choice("accounting_mode", accounting_mode, tuple(_ACCOUNTANTS))
        style: Any = clipping_style
        if isinstance(clipping_style, str):
            require_choice("clipping_style", clipping_style, _STYLES)
        else:
            style = _blocks(module, clipping_style)
        if noise_multiplier is not None:
            target_epsilon = None  # as in fastDP
        super().__init__(
            module,
            batch_size=batch_size,
            sample_size=sample_size,
            max_grad_norm=1.0 if clipping_fn == "automatic" else max_grad_norm,
            epochs=epochs,
            steps=num_steps if epochs is None else None,
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            target_delta=1 / (2 * sample_size) if target_delta is None else target_delta,
            clipping_fn=_FUNCTIONS[clipping_fn],
            clipping_mode=_MODES[clipping_mode],
            clipping_style=style,
            accountant=_ACCOUNTANTS[accounting_mode],
            loss_reduction=loss_reduction,
        )

    def attach(self, optimizer: Optimizer) -> None:
        """Add fastDP's methods to `optimizer`, which does not need them.

        Raises ConfigurationError if it holds none of the engine's parameters.
        """
        held = {p for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(self.internals.owned()):
            raise ConfigurationError(
                "The optimizer holds no parameter of the engine's model: create it with module.parameters()."
            )
        methods = {"get_privacy_spent": self.get_privacy_spent, "get_training_stats": self.get_training_stats}
        optimizer.__dict__.update(privacy_engine=self, **methods)

    def privatize(self) -> None:
        """Make gradients private; as in fastDP, a sum loss is not divided."""
        released = self.step
        super().privatize()
        if self.step > released and self.mechanism.loss_reduction == "sum":
            gradients = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
            torch._foreach_mul_(gradients, float(self.mechanism.schedule[released]))

    def get_privacy_spent(self) -> Mapping[str, float]:
        """Return epsilon so far at target_delta, as "eps_rdp" or "eps_pld"."""
        return {f"eps_{self.mechanism.accountant}": self.epsilon()}

    def get_training_stats(self) -> Mapping[str, float]:
        """Return `metrics()`, which are not private."""
        return self.metrics()


def _blocks(module: nn.Module, heads: Sequence[str]) -> list[list[str]]:
    known = {name for name, _ in module.named_modules()}
    if unknown := sorted(set(heads) - known):
        raise ConfigurationError(f"clipping_style names {', '.join(unknown)}, but the model has no such layer.")
    blocks: list[list[str]] = []
    begun: set[str] = set()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        for head in heads:
            if name.startswith(f"{head}.") and head not in begun:
                begun.add(head)
                blocks.append([])
        if not blocks:
            raise ConfigurationError(
                f"clipping_style: {name} comes before the first named layer. Name the model's first layer too."
            )
        blocks[-1].append(name)
    return blocks
